"""Seconds per message phase on stock Flower and on our nodes, interleaved.

``python -m benchmarks.rounds [--quick] [--device cuda:0] [--json FILE]``

With another Flower than 1.32, as in ``.flower/1.41.0/bin/python -m benchmarks.rounds --quick``
after ``make test-flower VERSION=1.41.0``, both have Flower's own SuperLink.

Both federations are up at once and take turns, so that other load affects both. Both run FedAvg
(`benchmarks/rounds_app`), stock Flower with its own grid, ours with ours. A phase lasts from
sending its messages to having all replies. The first phase of a run, which loads the app, is
ignored.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.figures import spread, write_json
from benchmarks.flower_federation import FlowerFederation
from flwr_distill.fleet.local_federation import LocalFederation
from flwr_distill.node.nursery import NURSERIES, SERVER_APP

APP_DIR = Path(__file__).parent / "rounds_app"
IDLE_SETTLE = 15.0
IDLE_SECONDS = 10.0
NAME_LENGTH = 15
"""Characters of a process's name that the system keeps."""
_PHASE = re.compile(r"PHASE ([\d.]+) (\d+) (\d+)")


Federation = LocalFederation | FlowerFederation


@dataclass(frozen=True)
class Case:
    """Phases to time with some work on some nodes."""

    nodes: int
    work: str
    megabytes: float
    stock_phases: int
    ours_phases: int


@dataclass
class Row:
    """Seconds per phase of a case on both systems."""

    case: Case
    stock: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Stock Flower's median over ours."""
        return statistics.median(self.stock) / statistics.median(self.ours)


@contextmanager
def repeating(action: Callable[[], None], *, every: float) -> Iterator[None]:
    """Call an action every so many seconds, in a thread."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(every):
            action()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def peak_memory(federation: Federation) -> Iterator[dict[str, int]]:
    """Sample resident memory of a federation's processes: peak by kind of process."""
    peaks: dict[str, int] = {}

    def sample() -> None:
        for process in processes(federation):
            try:
                size = process.memory_info().rss
            except psutil.Error:
                continue
            if size and (kind := kind_of(process)):
                peaks[kind] = max(size, peaks.get(kind, 0))

    with repeating(sample, every=0.2):
        yield peaks


def processes(federation: Federation, *, nodes_only: bool = False) -> list[psutil.Process]:
    """Live processes of a federation, with those that its nurseries forked."""
    roots = [node.pid for node in federation.nodes]
    if not nodes_only:
        roots += [federation.superlink_pid, federation.serverapps_pid]
    live = []
    for pid in roots:
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            live += [root, *root.children(recursive=True)]
    if isinstance(federation, LocalFederation):
        for pid in federation.nursery_pids:
            with suppress(psutil.NoSuchProcess):
                live += psutil.Process(pid).children(recursive=True)
    if nodes_only:
        live = [process for process in live if kind_of(process) != SERVER_APP]
    return list(dict.fromkeys(live))


def kind_of(process: psutil.Process) -> str:
    """What a process runs, see `program_of`; empty if it has ended."""
    try:
        return program_of(process.name(), process.cmdline())
    except psutil.Error:
        return ""


def program_of(name: str, command: Sequence[str]) -> str:
    """Program or module of a process with this name and command line.

    What a nursery forked has the nursery's command line, and the module in its name.
    """
    for module in chain.from_iterable(NURSERIES.values()):
        if name == (own := module.partition(".")[2])[:NAME_LENGTH]:
            return own
    words = [Path(word).name.removeprefix("flwr_distill.") for word in command[:6]]
    if "node" in words[:3]:
        return "node.main"
    if "superlink" in words:
        return "superlink"
    for word in words:
        if word.startswith(("flower-", "flower.", "flwr-", "node.")):
            return word
    return "other"


def idle_cpu(federation: Federation) -> float:
    """CPU time of one idle node, in per cent of a core."""
    before = {
        process: sum(process.cpu_times()[:2]) for process in processes(federation, nodes_only=True)
    }
    time.sleep(IDLE_SECONDS)
    used: float = sum(sum(process.cpu_times()[:2]) - start for process, start in before.items())
    return 100 * used / IDLE_SECONDS / len(federation.nodes)


def run_phases(federation: Federation, case: Case, *, fast: bool) -> list[float]:
    """Run the app; return the seconds of its phases without the first."""
    phases = case.ours_phases if fast else case.stock_phases
    outcome = federation.run(
        APP_DIR,
        {
            "work": case.work,
            "megabytes": case.megabytes,
            "phases": phases + 1,
            "nodes": case.nodes,
            "fast": fast,
        },
        timeout=900,
    )
    matches = [match for line in outcome.lines if (match := _PHASE.search(line))]
    complete = [float(m[1]) for m in matches if int(m[2]) == case.nodes and m[3] == "0"]
    if not outcome.completed or len(complete) != phases + 1:
        raise RuntimeError("a run failed:\n" + "\n".join(outcome.lines[-40:]))
    return complete[1:]


@contextmanager
def both_federations(nodes: int, device: str) -> Iterator[tuple[Federation, Federation]]:
    """Start stock Flower and ours together."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        settings = {"device": device}
        stock = FlowerFederation(nodes, directory / "stock", ours=0, node_settings=settings)
        ours = LocalFederation(nodes, directory / "ours", node_settings=settings)
        yield stack.enter_context(stock), stack.enter_context(ours)


def measure(nodes: int, cases: Sequence[Case], *, blocks: int, device: str) -> dict[str, Any]:
    """Time the cases with one number of nodes; also memory and idle CPU."""
    rows = [Row(case) for case in cases]
    with both_federations(nodes, device) as (stock, ours):
        with peak_memory(stock) as stock_peaks, peak_memory(ours) as our_peaks:
            for _ in range(blocks):
                for row in rows:
                    row.stock += run_phases(stock, row.case, fast=False)
                    row.ours += run_phases(ours, row.case, fast=True)
                    print(
                        f"{nodes} nodes, {row.case.work}, {row.case.megabytes:g} MB: "
                        f"stock {spread(row.stock)} s, ours {spread(row.ours)} s",
                        flush=True,
                    )
        time.sleep(IDLE_SETTLE)
        return {
            "nodes": nodes,
            "rows": rows,
            "idle_cpu_percent": {"stock": idle_cpu(stock), "ours": idle_cpu(ours)},
            "peak_rss_bytes": {"stock": stock_peaks, "ours": our_peaks},
        }


def cases_for(nodes: int, *, quick: bool) -> list[Case]:
    """Cases with this number of nodes."""
    if quick:
        return [Case(nodes, "trivial", 0.2, stock_phases=3, ours_phases=10)]
    return [
        Case(nodes, "trivial", 0.2, stock_phases=5, ours_phases=15),
        Case(nodes, "trivial", 4, stock_phases=4, ours_phases=8),
        Case(nodes, "trivial", 64, stock_phases=3, ours_phases=3),
        Case(nodes, "digits", 0.2, stock_phases=4, ours_phases=8),
    ]


def show(measured: Sequence[dict[str, Any]]) -> None:
    """Print tables."""
    console = Console()
    table = Table("nodes", "work", "MB", "stock: median (min-max) s", "ours", "ratio")
    for part in measured:
        for row in part["rows"]:
            table.add_row(
                str(row.case.nodes),
                row.case.work,
                f"{row.case.megabytes:g}",
                spread(row.stock),
                spread(row.ours),
                f"{row.ratio:.1f}",
            )
    console.print(table)
    for part in measured:
        idle = ", ".join(
            f"{name} {value:.1f} %" for name, value in part["idle_cpu_percent"].items()
        )
        console.print(f"{part['nodes']} nodes: CPU of an idle node: {idle}")
        for name, peaks in part["peak_rss_bytes"].items():
            sizes = ", ".join(f"{kind} {size / 1e6:.0f}" for kind, size in sorted(peaks.items()))
            console.print(f"{part['nodes']} nodes, {name}: peak resident MB: {sizes}")


def as_json(measured: Sequence[dict[str, Any]], device: str) -> dict[str, Any]:
    """Figures as JSON, the most important first."""
    trivial = measured[0]["rows"][0]
    return {
        "ratio_trivial": trivial.ratio,
        "stock_seconds": statistics.median(trivial.stock),
        "ours_seconds": statistics.median(trivial.ours),
        "device": device,
        "cores": os.cpu_count(),
        "measured": [
            {**part, "rows": [{**asdict(row), "ratio": row.ratio} for row in part["rows"]]}
            for part in measured
        ],
    }


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(prog="benchmarks.rounds", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 nodes, trivial work, few phases")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N, for the work on digits")
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 10], help="unless --quick")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    measured = [
        measure(
            nodes,
            cases_for(nodes, quick=args.quick),
            blocks=1 if args.quick else 2,
            device=args.device,
        )
        for nodes in ([2] if args.quick else args.nodes)
    ]
    show(measured)
    write_json(args.json, as_json(measured, args.device))


if __name__ == "__main__":
    main()
