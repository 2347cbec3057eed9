"""Starts systems, one after the other, and times their rounds from outside.

A system is a tree of processes that adds a line to a file as a round ends. Clients a second are
those of all rounds but the first, over the time from the first round's end to the last one's.
Start-up is the time from the start of the process to the first round's end, less a median round.
Megabytes are the largest sum over the tree of PSS: its own memory, and its share of pages that
several processes have. Where the system does not say PSS (macOS), it is the processes' own memory.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.figures import spread, write_json
from benchmarks.peers.environments import NotInstalledError, prepare
from benchmarks.peers.systems import PLAIN, ROOT, SYSTEMS, System
from benchmarks.peers.work import STEPS, Work, cores

SAMPLE_EVERY = 1.0
ENDS_WITHIN = 900.0
FIGURES = {"clients_per_second": 0, "startup_seconds": 1, "megabytes": 0}
"""What is measured, with its decimal places in the table."""
CLIENTS_A_RUN = 1000
"""Clients that train after the first round."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class FailedError(Exception):
    """A system has not done its work."""


@dataclass(frozen=True)
class SetUp:
    """Clients, how many of them train in a round, and the number of rounds."""

    clients: int
    a_round: int
    rounds: int

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.a_round} of {self.clients:,}"


SET_UPS = [
    SetUp(clients, a_round, 1 + CLIENTS_A_RUN // a_round)
    for clients, a_round in ((100, 10), (100, 50), (1000, 50))
]
QUICK = SetUp(100, 10, 6)


@dataclass(frozen=True)
class Run:
    """What was measured in one run."""

    clients_per_second: float
    startup_seconds: float
    megabytes: float


@dataclass
class Row:
    """Runs of a system with a set-up, or why there are none."""

    set_up: SetUp
    system: System
    runs: list[Run] = field(default_factory=list)
    error: str = ""

    def values(self, name: str) -> list[float]:
        """What was measured in each run."""
        return [getattr(run, name) for run in self.runs]


def measure(
    systems: Sequence[System], set_up: SetUp, peers_dir: Path, *, repeats: int
) -> Iterator[list[Row]]:
    """Run each system once a repeat, another one first each time; yield all rows after a run."""
    rows = {system.name: Row(set_up, system) for system in systems}
    for repeat in range(repeats):
        first = repeat % len(systems)
        for system in [*systems[first:], *systems[:first]]:
            row = rows[system.name]
            if row.error:
                continue
            try:
                row.runs.append(run(system, set_up, peers_dir))
            except NotInstalledError as error:
                row.error = f"not installed: {error}"
            except (FailedError, OSError) as error:
                row.error = f"failed: {error}"
            print(f"{set_up.name}, {system.name}: {row.error or row.runs[-1]}", flush=True)
            yield [*rows.values()]


def run(system: System, set_up: SetUp, peers_dir: Path) -> Run:
    """Run a system once.

    Raises
    ------
    NotInstalledError
        If its project cannot be installed.
    FailedError
        If it has not trained all clients in all rounds.
    OSError
        If its command is not there.
    """
    commands = Path(sys.executable).parent
    if system.project:
        commands = prepare(system.project, peers_dir)
    with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as folder:
        work = Work(set_up.clients, set_up.a_round, set_up.rounds, folder)
        command, variables = system.start(work)
        env = {name: value for name, value in os.environ.items() if name not in THREADS}
        env |= {
            "PATH": os.pathsep.join([str(commands), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
            **work.environment(),
            **variables,
        }
        output = Path(folder) / "output.log"
        with output.open("w") as file:
            started = time.time()
            process = psutil.Popen(
                command,
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        megabytes = _wait(process)
        rounds = [json.loads(line) for line in work.log.open()] if work.log.exists() else []
        _check(rounds, work, output)
    speed, startup = timed(started, [one["at"] for one in rounds], set_up.a_round)
    return Run(speed, startup, megabytes)


def timed(started: float, ends: Sequence[float], a_round: int) -> tuple[float, float]:
    """Clients a second and start-up seconds, from the times at which rounds ended."""
    rounds = [end - start for start, end in pairwise(ends)]
    return a_round * len(rounds) / sum(rounds), ends[0] - started - statistics.median(rounds)


def _check(rounds: Sequence[dict[str, Any]], work: Work, output: Path) -> None:
    """Check that all rounds trained; a crash after the last one, as of BlazeFL's, is no failure."""
    if len(rounds) < work.rounds:
        tail = output.read_text(errors="replace").strip()[-2000:]
        raise FailedError(f"{len(rounds)} of {work.rounds} rounds\n{tail}")
    for number, one in enumerate(rounds, 1):
        if one["steps"] != work.a_round * STEPS or not 0 < one["change"] < math.inf:
            raise FailedError(f"round {number}: {one}, not {work.a_round * STEPS} steps")


def _wait(process: psutil.Popen) -> float:
    """Wait for a process; return the most megabytes of its tree, of which nothing is left."""
    seen: set[psutil.Process] = set()
    most = 0.0
    end = time.monotonic() + ENDS_WITHIN
    with _ended(seen):
        while process.poll() is None and time.monotonic() < end:
            tree: list[psutil.Process] = [process]
            with suppress(psutil.NoSuchProcess):
                tree += process.children(recursive=True)
            seen.update(tree)
            most = max(most, sum(map(_memory, tree)))
            time.sleep(SAMPLE_EVERY)
    return most / 1e6


def _memory(process: psutil.Process) -> float:
    with suppress(psutil.Error):
        memory = process.memory_full_info()
        return float(getattr(memory, "pss", memory.uss))
    return 0.0


@contextmanager
def _ended(processes: set[psutil.Process]) -> Iterator[None]:
    """Afterwards, end what still runs of these, such as Flower's SuperLink."""
    try:
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        for process in psutil.wait_procs(processes, timeout=10)[1]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """Figures as JSON: medians, and the smallest and largest value of each."""
    return {"cores": cores(), "rows": [_row_as_json(row, _ratio(row, rows)) for row in rows]}


def _row_as_json(row: Row, ratio: float | None) -> dict[str, Any]:
    figures: dict[str, Any] = {"set-up": row.set_up.name, "system": row.system.name}
    for name in FIGURES:
        values = row.values(name)
        figures[name] = statistics.median(values) if values else None
        figures[f"{name}_range"] = [min(values), max(values)] if values else None
    return {**figures, "ratio": ratio, "error": row.error or None}


def _ratio(row: Row, rows: Sequence[Row]) -> float | None:
    """Clients a second over those of the plain loop."""
    name = "clients_per_second"
    for base in rows:
        if base.set_up == row.set_up and base.system is PLAIN and base.runs and row.runs:
            return statistics.median(row.values(name)) / statistics.median(base.values(name))
    return None


def show(rows: Sequence[Row]) -> None:
    """Print a table of medians, smallest and largest values."""
    table = Table("clients", "system", "clients a second", "start-up [s]", "MB", "ratio")
    for row in rows:
        system = Text(row.system.name)
        cells: list[str | Text] = [row.set_up.name, system]
        if row.runs:
            cells += [spread(row.values(name), places) for name, places in FIGURES.items()]
            ratio = _ratio(row, rows)
            cells.append("" if ratio is None else f"{ratio:.2f}")
        if row.error:
            system.append(f"\n{row.error}", style="red")
        table.add_row(*cells)
    Console().print(table)


def compare(peers_dir: Path, *, quick: bool, repeats: int, file: Path | None) -> None:
    """Measure all systems; print the figures, and write them to a file after each run."""
    done: list[Row] = []
    for set_up in [QUICK] if quick else SET_UPS:
        rows: list[Row] = []
        for rows in measure(SYSTEMS, set_up, peers_dir, repeats=1 if quick else repeats):
            write_json(file, as_json([*done, *rows]))
        done += rows
    show(done)
