"""Plain loops side by side, one a core, that exchange nothing: no cost of a federation."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.peers.work import Work, cores


def main() -> None:
    """Split the clients of each round among the loops; a round ends with the slowest of them."""
    work = Work.of_this_process()
    loops = [*_loops(work)]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peers.plain"],
            env={**os.environ, **loop.environment()},
        )
        for loop in loops
    ]
    for process in started:
        process.wait()
    logs = [map(json.loads, loop.log.read_text().splitlines()) for loop in loops]
    with work.log.open("w") as file:
        for parts in zip(*logs, strict=True):
            ended = {
                "at": max(part["at"] for part in parts),
                "steps": sum(part["steps"] for part in parts),
                "change": min(part["change"] for part in parts),
            }
            file.write(json.dumps(ended) + "\n")


def _loops(work: Work) -> Iterator[Work]:
    for core in range(min(cores(), work.a_round)):
        folder = Path(work.folder) / f"loop-{core}"
        folder.mkdir()
        share = len(range(core, work.a_round, cores()))
        yield replace(work, a_round=share, folder=str(folder))


if __name__ == "__main__":
    main()
