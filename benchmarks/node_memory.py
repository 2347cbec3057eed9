"""Memory of a node's processes, and how soon one that was idle takes its first step.

``python -m benchmarks.node_memory [--quick] [--json FILE]``

A SuperLink and one ``flwr-distill node``, as on a machine of its own. Memory is read when the node
has started, when it has been idle for longer than ``release-after`` (here 5 s), in a run, and after
it: RSS, PSS (pages of several processes are shared out, so that the sum is what the machine gives)
and what is one process's own. A first step counts from when the server made the message; CPU is
the worker's since its start, or since the step before.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.rounds import APP_DIR
from fleet.local_federation import LocalFederation
from node.nursery import NURSERY
from node.supervisor import status_file

APP = Path(__file__).resolve().parent.parent
RELEASE_AFTER = 5.0
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
    """Read a node's memory in each state, and time its first steps."""
    with tempfile.TemporaryDirectory() as folder:
        node_settings = {"device": "cpu", "release-after": RELEASE_AFTER, **settings}
        with OneNode(1, Path(folder), node_settings=node_settings) as federation:
            federation.wait_until(lambda: federation.is_ready)
            memory = {"started": federation.memory()}
            steps: dict[str, list[tuple[float, float]]] = {"idle before": [], "warm": []}
            phases: dict[str, list[float]] = {"idle before": [], "warm": []}
            for number in range(times):
                time.sleep(RELEASE_AFTER + 5.0)
                memory["idle" if number == 0 else "idle after a run"] = federation.memory()
                first, *more = take_steps(federation, 4)
                steps["idle before"].append(first)
                steps["warm"] += more
            for _ in range(times):
                for state in ("idle before", "warm"):
                    if state == "idle before":
                        time.sleep(RELEASE_AFTER + 5.0)
                    seconds, peak = first_phase(federation, Path(folder) / "runs")
                    phases[state].append(seconds)
                    memory["in a run"] = peak
    return {"settings": settings, "memory": memory, "steps": steps, "phases": phases}


def take_steps(federation: OneNode, number: int) -> list[tuple[float, float]]:
    """Seconds to the first step of each of so many messages, and the worker's CPU seconds."""
    config = {"work": "step", "phases": number, "nodes": 1, "fast": True}
    outcome = federation.run(APP_DIR, config, timeout=300)
    found = [match for line in outcome.lines if (match := _STEP.search(line))]
    if not outcome.completed or len(found) != number:
        raise RuntimeError("a run failed:\n" + "\n".join(outcome.lines[-40:]))
    seconds = [float(match[1]) for match in found]
    cpu = [0.0, *(float(match[2]) for match in found)]
    used = [after - before for before, after in zip(cpu, cpu[1:], strict=False)]
    return list(zip(seconds, used, strict=True))


def first_phase(federation: OneNode, runs: Path) -> tuple[float, Memory]:
    """Seconds from a run's submission to the end of its first round, and memory in the run.

    The run is FedAvg on digits with this project's app.
    """
    ended = threading.Event()
    seen: list[Memory] = []

    def look() -> None:
        while not ended.wait(0.3):
            seen.append(federation.memory())

    thread = threading.Thread(target=look)
    settings = {"strategy": "fedavg", "num-rounds": 2, "min-nodes": 1, "runs-dir": str(runs)}
    thread.start()
    try:
        outcome = federation.run(APP, settings, timeout=300)
    finally:
        ended.set()
        thread.join()
    if not outcome.completed:
        raise RuntimeError("a run failed:\n" + "\n".join(outcome.lines[-40:]))
    newest = max(runs.iterdir(), key=lambda folder: folder.stat().st_mtime)
    rows = map(json.loads, (newest / "journal.jsonl").read_text().splitlines())
    return next(row["seconds"] for row in rows if row.get("phase")), max(seen, key=_total)


def _total(memory: Memory) -> float:
    return sum(part["pss"] for part in memory.values())
