"""Memory of a node's processes, and how soon one that was idle takes its first step.

``python -m benchmarks.node_memory [--quick] [--json FILE]``

A SuperLink with a database and one ``flwr-distill node``, as on a machine of its own. Memory is
read when the node has started, when it has been idle for longer than ``release-after`` (here 15 s),
in a run of this project's app, and two minutes after the last one: RSS, PSS (pages of several
processes are shared out, so that the sum is what the machine gives) and what is one process's own.
A first step is that of an app that only takes it, and counts from when the server made the message;
CPU is the worker's, since its start or since the step before. A first answer is that of this
project's app to the server's first question, for which it reads its data.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.figures import read_lines, spread, write_json
from benchmarks.rounds import APP_DIR, repeating
from flwr_distill.fleet.local_federation import LocalFederation
from flwr_distill.node.nursery import NURSERY
from flwr_distill.node.supervisor import status_file

APP = Path(__file__).resolve().parent.parent
RELEASE_AFTER = 15.0
_REST = RELEASE_AFTER + 5.0
_SETTLED = 120.0
"""Seconds in which a SuperNode gives back what runs have left."""
_STEP = re.compile(r"STEP ([\d.]+) ([\d.]+)")
_WITHIN = 120.0
PARTS = ("supernode", "executor", "nursery", "worker", "mailbox")

Memory = dict[str, dict[str, float]]
"""MB of ``rss``, ``pss`` and ``own`` by part."""


class OneNode(LocalFederation):
    """A SuperLink and a node whose processes nobody has imported anything for."""

    def node_command(self, settings: Path) -> list[str]:
        """Command of a node as users start it."""
        program = str(Path(sys.executable).with_name("flwr-distill"))
        return ["env", f"--unset={NURSERY}", program, "node", "--config", str(settings)]

    @property
    def status(self) -> dict[str, Any]:
        """What the node says of itself."""
        content: dict[str, Any] = json.loads(status_file(self.nodes[0].state_dir).read_text())
        return content

    @property
    def is_ready(self) -> bool:
        """Whether the node's first worker has been warm."""
        return {"online", "ready"} <= self.status.keys()

    def wait_until(self, what: Callable[[], bool]) -> None:
        """Wait for something that will be the case soon."""
        deadline = time.monotonic() + _WITHIN
        while not what():
            if time.monotonic() > deadline:
                raise RuntimeError(f"not within {_WITHIN:.0f} s: {self.status}")
            time.sleep(0.05)

    def memory(self) -> Memory:
        """MB of the node's processes now."""
        names = {self.status.get(name): name for name in PARTS}
        root = psutil.Process(self.nodes[0].pid)
        found: Memory = {}
        for process in [root, *root.children(recursive=True)]:
            full = process.memory_full_info()
            name = "supervisor" if process == root else names.get(process.pid, "other")
            found[name] = {
                "rss": full.rss / 1e6,
                "pss": full.pss / 1e6,
                "own": full.uss / 1e6,
            }
        return found


def measure(settings: dict[str, Any], *, times: int) -> dict[str, Any]:
    """Read a node's memory in each state, and time what it does first."""
    with tempfile.TemporaryDirectory() as folder:
        node_settings = {"device": "cpu", "release-after": RELEASE_AFTER, **settings}
        database = Path(folder) / "superlink.db"
        federation = OneNode(1, Path(folder), node_settings=node_settings, database=database)
        with federation:
            federation.wait_until(lambda: federation.is_ready)
            memory = {"started": federation.memory()}
            time.sleep(_REST)
            memory["idle"] = federation.memory()
            steps: dict[str, list[tuple[float, float]]] = {"rested": [], "at work": []}
            answers: dict[str, list[float]] = {"rested": [], "at work": []}
            for _ in range(times):
                first, *more = take_steps(federation, 4)
                steps["rested"].append(first)
                steps["at work"] += more
                time.sleep(_REST)
                for state in answers:
                    seconds, memory["in a run"] = first_answer(federation, Path(folder) / "runs")
                    answers[state].append(seconds)
                time.sleep(_REST)
            time.sleep(_SETTLED)
            memory["idle after runs"] = federation.memory()
    return {"settings": settings, "memory": memory, "steps": steps, "answers": answers}


def take_steps(federation: OneNode, number: int) -> list[tuple[float, float]]:
    """Seconds to the first step of each of so many messages, and the worker's CPU seconds."""
    config = {"work": "step", "phases": number, "nodes": 1, "fast": True}
    found = [match for line in _run(federation, APP_DIR, config) if (match := _STEP.search(line))]
    cpu = [0.0, *(float(match[2]) for match in found)]
    used = [after - before for before, after in pairwise(cpu)]
    return list(zip([float(match[1]) for match in found], used, strict=True))


def first_answer(federation: OneNode, runs: Path) -> tuple[float, Memory]:
    """Seconds to the answer to the first message of a run of FedAvg; most memory in that run."""
    most: Memory = {}

    def look() -> None:
        nonlocal most
        with suppress(psutil.Error, OSError, ValueError):  # a process or the status has changed
            most = max(most, federation.memory(), key=lambda memory: total(memory, "pss"))

    config = {"strategy": "fedavg", "num-rounds": 2, "min-nodes": 1, "runs-dir": str(runs)}
    with repeating(look, every=0.3):
        _run(federation, APP, config)
    newest = max(runs.iterdir(), key=lambda folder: folder.stat().st_mtime)
    rows = read_lines(newest / "journal.jsonl")
    return next(row["seconds"] for row in rows if row.get("phase")), most


def _run(federation: OneNode, app: Path, config: dict[str, Any]) -> list[str]:
    outcome = federation.run(app, config, timeout=300)
    if not outcome.completed:
        raise RuntimeError("a run failed:\n" + "\n".join(outcome.lines[-40:]))
    return outcome.lines


def total(memory: Memory, kind: str) -> float:
    """MB of all parts."""
    return sum(part[kind] for part in memory.values())


def show(measured: list[dict[str, Any]]) -> None:
    """Print tables."""
    console = Console()
    for each in measured:
        name = json.dumps(each["settings"])
        table = Table("MB, RSS / PSS / own", *each["memory"], title=f"settings {name}")
        parts = dict.fromkeys(part for memory in each["memory"].values() for part in memory)
        for part in parts:
            sizes = [memory.get(part) for memory in each["memory"].values()]
            table.add_row(part, *("-" if size is None else _sizes(size) for size in sizes))
        sums = [
            {kind: total(memory, kind) for kind in ("rss", "pss", "own")}
            for memory in each["memory"].values()
        ]
        table.add_row("sum", *map(_sizes, sums))
        console.print(table)
        table = Table("", "first step [s]", "worker's CPU [s]", "first answer [s]")
        for state, steps in each["steps"].items():
            seconds, cpu = zip(*steps, strict=True)
            table.add_row(state, *map(spread, (seconds, cpu, each["answers"][state])))
        console.print(table)


def _sizes(part: dict[str, float]) -> str:
    return " / ".join(f"{part[kind]:.0f}" for kind in ("rss", "pss", "own"))


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(prog="benchmarks.node_memory", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="once, and not with keep-warm")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    cases: list[dict[str, Any]] = [{}] if args.quick else [{}, {"keep-warm": True}]
    measured = [measure(settings, times=1 if args.quick else 3) for settings in cases]
    show(measured)
    if args.json is not None:
        idle = total(measured[0]["memory"]["idle"], "pss")
        figures = {"idle_mb": idle, "cores": os.cpu_count(), "measured": measured}
        write_json(args.json, figures)


if __name__ == "__main__":
    main()
