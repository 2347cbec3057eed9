"""Measures how long a user waits from `flwr-distill up` to the first round of `flwr-distill run`.

``python -m benchmarks.first_round [--nodes 5]`` starts a local federation and a run with the
commands themselves, and prints when each thing is there, in seconds since the start of `up`, and
how much of a core's time all of it has taken.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

COMMAND = [str(Path(sys.executable).parent / "flwr-distill")]
MARKS = {
    "are online": "all nodes are online",
    "started run": "the run is accepted",
    "round   0/": "the initial model is judged",
    "round   1/": "the first round is over",
}


def main() -> None:
    """Measure once, and end everything that was started."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--run-config", "-c", default="num-rounds=1")
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        up = _start(folder, "up", "--nodes", str(args.nodes))
        try:
            _watch(up, began, until="flwr-distill run")
            run = _start(folder, "run", "--run-config", args.run_config)
            _watch(run, began)
            run.wait()
        finally:
            up.terminate()
            up.wait()
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = usage.ru_utime + usage.ru_stime
    print(f"{seconds:6.1f} s of a core in all, with {os.cpu_count()} cores")


def _start(folder: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments], cwd=folder, stdout=subprocess.PIPE, text=True, bufsize=1
    )


def _watch(process: subprocess.Popen[str], began: float, until: str = "") -> None:
    """Print when the marked lines come, to the end or until a line has this text."""
    lines: IO[str] | None = process.stdout
    assert lines is not None
    for line in lines:
        for text, meaning in MARKS.items():
            if text in line:
                print(f"{time.monotonic() - began:6.1f} s  {meaning}", flush=True)
        if until and until in line:
            return


if __name__ == "__main__":
    main()
