"""One SuperLink under many nodes: polls a second, CPU, memory and phases, at our pace and stock.

``python -m benchmarks.fleet [--quick] [--nodes N ...] [--json FILE]``

The SuperLink is Flower's, with SQLite, TLS and node authentication: at stock pace as it is, at ours
as `flwr-distill superlink` starts it. Nodes are light: Flower's own
SuperNode loop, many in a process, without app and guard (`benchmarks.light_nodes`). A run is FedAvg
(`benchmarks/rounds_app`) with small arrays, on Flower's grid at stock pace and on ours at ours. A
phase lasts from sending its messages to having all replies; the first, which loads the app, is
ignored. CPU is that of the SuperLink's process alone, in per cent of a core.

Of 1,000 nodes a tenth trains a round. Nodes at our pace rest for a minute before they are looked at
while idle, for as long as a poll waits. Under the most nodes the SuperLink is killed and started
again. ``--quick`` has fewer nodes and phases, and nodes that have just come, with all heartbeats.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from rich.console import Console
from rich.table import Table

from benchmarks.figures import write_json
from benchmarks.light_nodes import REGISTERED, Door, Told, serve
from benchmarks.rounds import APP_DIR
from flwr_distill.fleet.authority import new_key
from flwr_distill.fleet.certificates import CertificateFolder
from flwr_distill.fleet.local_federation import free_ports
from flwr_distill.fleet.servers import Addresses, listening_arguments
from flwr_distill.fleet.submission import RunError, RunOutcome, submit
from flwr_distill.flower.control import Control, open_control
from flwr_distill.node.pace import MAX_WAIT
from flwr_distill.node.processes import Process, kill_group, start_bound, stop

PER_PROCESS = 250
"""Light nodes in a process."""
REST = 60.0
"""Seconds until each node's poll has waited once, and stands for heartbeats."""
BACK = 240.0
"""Seconds to wait for nodes after a restart."""
RUN = 600.0
"""Seconds that a run may take."""
MEGABYTES = 0.01
MANY = 1000
"""From so many nodes on, a tenth of them trains a round, and the others rest."""
Row = dict[str, Any]
_PHASE = re.compile(r"PHASE ([\d.]+) (\d+) (\d+)")
_QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


class SuperLink:
    """Flower's SuperLink with SQLite, TLS and node authentication, in a folder."""

    def __init__(self, folder: Path, *, ours: bool) -> None:
        self._folder = folder
        python = (sys.executable, "-P", "-m", "flwr_distill.command", "superlink")
        self._program = python if ours else ("flower-superlink",)
        self.certificates = CertificateFolder(folder / "certs")
        self.certificates.create(30)
        self.certificates.issue_server(["127.0.0.1", "localhost"], 10)
        port, *others = free_ports(3)
        self._addresses = Addresses.beside(f"127.0.0.1:{port}", *others)
        self.fleet = self._addresses.fleet
        self._process: Process | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        certs = self._folder / "certs/server"
        commands = str(Path(sys.executable).parent)
        self._process = start_bound(
            [
                *self._program,
                *(("--enable-supernode-auth",) if REGISTERED else ()),
                *("--database", str(self._folder / "state.db")),
                "--disable-runtime-dependency-installation",
                *("--ssl-ca-certfile", str(certs / "ca.crt")),
                *("--ssl-certfile", str(certs / "server.crt")),
                *("--ssl-keyfile", str(certs / "server.key")),
                *listening_arguments(self._addresses),
            ],
            log=self._folder / "superlink.log",
            env={
                **os.environ,
                **_QUIET,
                "PATH": os.pathsep.join([commands, os.environ.get("PATH", os.defpath)]),
                "FLWR_HOME": str(self._folder / "flower"),
            },
        )
        with self.control() as control:
            control.wait(60.0)

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        assert self._process is not None
        kill_group(self._process)

    def stop(self) -> None:
        """End it."""
        assert self._process is not None
        stop([self._process])

    def control(self) -> Control:
        """A connection to its Control API."""
        return open_control(self._addresses.control, self.certificates.certificate)

    @property
    def process(self) -> psutil.Process:
        """Its process."""
        assert self._process is not None
        return psutil.Process(self._process.pid)


class Fleet:
    """Light nodes in processes of their own."""

    def __init__(self, superlink: SuperLink, keys: Sequence[bytes], *, ours: bool) -> None:
        self._superlink = superlink
        self.size = len(keys)
        self._questions: list[Connection] = []
        self._processes = []
        context = multiprocessing.get_context("spawn")
        certificate = superlink.certificates.certificate.read_bytes()
        for start in range(0, len(keys), PER_PROCESS):
            door = Door(superlink.fleet, certificate, keys[start : start + PER_PROCESS])
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(door, ours, there), daemon=True)
            process.start()
            self._questions.append(here)
            self._processes.append(process)

    def tell(self, since: float = 0.0) -> Told:
        """What all nodes tell."""
        for questions in self._questions:
            questions.send(since)
        told = [asdict(questions.recv()) for questions in self._questions]
        return Told(**{name: sum(each[name] for each in told) for name in told[0]})

    def wait(self, since: float, timeout: float) -> int:
        """Wait until all nodes' polls were answered after `since`; return how many were."""
        deadline = time.monotonic() + timeout
        while (answered := self.tell(since).answered) < self.size and time.monotonic() < deadline:
            time.sleep(0.25)
        return answered

    def end(self) -> None:
        """Kill them."""
        for process in self._processes:
            process.kill()
            process.join()


@contextmanager
def fleet(folder: Path, nodes: int, *, ours: bool) -> Iterator[tuple[SuperLink, Fleet]]:
    """Start a SuperLink and so many nodes, registered and online."""
    superlink = SuperLink(folder, ours=ours)
    superlink.start()
    light = None
    try:
        keys = []
        with superlink.control() as control:
            for _ in range(nodes):
                private = new_key() if ours else ec.generate_private_key(ec.SECP384R1())
                keys.append(
                    private.private_bytes(
                        serialization.Encoding.PEM,
                        serialization.PrivateFormat.PKCS8,
                        serialization.NoEncryption(),
                    )
                )
                if REGISTERED:
                    control.register(
                        private.public_key()
                        .public_bytes(
                            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
                        )
                        .decode()
                    )
        light = Fleet(superlink, keys, ours=ours)
        if (online := light.wait(0.0, 300.0)) < nodes:
            raise RuntimeError(f"{online} of {nodes} nodes came online in 300 s")
        yield superlink, light
    finally:
        if light is not None:
            light.end()
        superlink.stop()


def phases(superlink: SuperLink, light: Fleet, count: int, *, ours: bool, share: float) -> Row:
    """Run phases: their median and 95th percentile, and what each cost the SuperLink.

    A run that fails, or takes too long, gives what it had got, and why.
    """
    seen: list[tuple[float, float, Told]] = []

    def on_line(line: str) -> None:
        if (match := _PHASE.search(line)) and int(match[2]) == round(share * light.size):
            seen.append((float(match[1]), cpu(superlink), light.tell()))

    failed = ""
    try:
        outcome = run(superlink, light.size, count, ours=ours, share=share, on_line=on_line)
        if not outcome.completed:
            errors = [line for line in outcome.lines if "rror" in line]
            failed = (errors or [outcome.status])[-1][:200]
    except RunError as error:
        failed = str(error)
    row: Row = {"share": share, "phases": len(seen[1:])}
    if len(seen) > 1:
        seconds = [phase for phase, _, _ in seen[1:]]
        (_, cpu_before, before), (_, cpu_after, after) = seen[0], seen[-1]
        messages = max(after.messages - before.messages, 1)
        row |= {
            "phase_p50": statistics.median(seconds),
            "phase_p95": percentile_95(seconds),
            "cpu_seconds_per_phase": (cpu_after - cpu_before) / len(seconds),
            "pulls_per_message": (after.pulls - before.pulls) / messages,
            "polls_per_message": (after.polls - before.polls) / messages,
        }
    if failed:
        row["failed"] = failed
    return row


def run(
    superlink: SuperLink,
    nodes: int,
    count: int,
    *,
    ours: bool,
    share: float,
    on_line: Callable[[str], None] | None = None,
) -> RunOutcome:
    """Run FedAvg for one phase more than `count`."""
    settings: dict[str, str | int | float | bool] = {
        "megabytes": MEGABYTES,
        "phases": count + 1,
        "nodes": nodes,
        "share": share,
        "fast": ours,
    }
    return submit(APP_DIR, settings, control=superlink.control, on_line=on_line, timeout=RUN)


def cpu(superlink: SuperLink) -> float:
    """CPU seconds of a SuperLink so far."""
    times = superlink.process.cpu_times()
    return float(times.user + times.system)


def idle(superlink: SuperLink, light: Fleet, seconds: float) -> dict[str, float]:
    """Polls a second of idle nodes, and the SuperLink's CPU in per cent of a core."""
    before, start, polls = cpu(superlink), time.monotonic(), light.tell().polls
    time.sleep(seconds)
    passed = time.monotonic() - start
    return {
        "polls_per_second": (light.tell().polls - polls) / passed,
        "superlink_cpu": 100 * (cpu(superlink) - before) / passed,
        "superlink_mb": superlink.process.memory_info().rss / 1e6,
    }


def restart(superlink: SuperLink, light: Fleet, *, ours: bool) -> Row:
    """Kill a SuperLink under load, start it again, and tell when its nodes are back."""
    ending: list[BaseException] = []

    def load() -> None:
        try:
            run(superlink, light.size, 100, ours=ours, share=0.1)
        except RunError as error:
            ending.append(error)

    threading.Thread(target=load, daemon=True).start()
    time.sleep(15.0)
    superlink.kill()
    time.sleep(5.0)
    start = time.monotonic()
    superlink.start()
    up = time.monotonic()
    half = light.size // 2
    back: dict[str, float] = {}
    while time.monotonic() < up + BACK and "all_back_seconds" not in back:
        answered = light.tell(start).answered
        if answered >= half and "half_back_seconds" not in back:
            back["half_back_seconds"] = time.monotonic() - up
        if answered == light.size:
            back["all_back_seconds"] = time.monotonic() - up
        time.sleep(0.25)
    told = light.tell(start)
    with superlink.control() as control:
        for run in control.runs():
            if not run.status.finished:
                control.stop_run(run.run_id)
        online = sum(node.status == "online" for node in control.nodes())
    return {
        **back,
        "down_seconds": up - start + 5.0,
        "back": told.answered,
        "dead": light.size - told.alive,
        "online": online,
    }


def percentile_95(values: Sequence[float]) -> float:
    """The 95th percentile, by rank: with fewer than twenty values the largest."""
    return sorted(values)[-(-95 * len(values) // 100) - 1]


def measure(nodes: int, *, ours: bool, count: int, quick: bool, kill: bool) -> Row:
    """Measure a number of nodes at a pace; with `kill`, the SuperLink's restart, too."""
    with (
        tempfile.TemporaryDirectory() as folder,
        fleet(Path(folder), nodes, ours=ours) as (superlink, light),
    ):
        row: Row = {"nodes": nodes, "pace": "ours" if ours else "stock"}

        def add(figures: Row) -> None:
            row.update(figures)
            print(json.dumps(figures), flush=True)

        time.sleep(REST if ours and not quick else 0.0)
        add(idle(superlink, light, 10.0 if quick else MAX_WAIT))
        share = 0.1 if nodes >= MANY else 1.0
        add(phases(superlink, light, count, ours=ours, share=share))
        if kill:
            add({"restart": restart(superlink, light, ours=ours)})
        return row


def show(rows: Sequence[Row]) -> None:
    """Print a table."""
    table = Table("nodes", "pace", "train", *_COLUMNS.values())
    for row in rows:
        table.add_row(
            str(row["nodes"]),
            row["pace"],
            f"{row['share']:.0%}",
            *(f"{row[key]:.2f}" if key in row else "" for key in _COLUMNS),
        )
    console = Console()
    console.print(table)
    for row in rows:
        for key in ("failed", "restart"):
            if key in row:
                console.print(f"{row['nodes']} nodes, {row['pace']}, {key}: {row[key]}")


_COLUMNS = {
    "polls_per_second": "polls/s",
    "superlink_cpu": "CPU [%]",
    "superlink_mb": "MB",
    "phase_p50": "phase p50 [s]",
    "phase_p95": "p95 [s]",
    "cpu_seconds_per_phase": "CPU [s]",
    "pulls_per_message": "pulls",
}


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(prog="benchmarks.fleet", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="within 4 minutes")
    parser.add_argument("--nodes", type=int, nargs="+", help="numbers of nodes")
    parser.add_argument("--pace", choices=("stock", "ours"), nargs="+", default=["stock", "ours"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the figures")
    arguments = parser.parse_args()
    sizes = arguments.nodes or ([10, 100] if arguments.quick else [10, 100, 300, 1000])
    rows: list[Row] = []
    for nodes, pace in itertools.product(sizes, arguments.pace):
        row = measure(
            nodes,
            ours=pace == "ours",
            count=3 if arguments.quick else 10,
            quick=arguments.quick,
            kill=not arguments.quick and nodes == max(sizes),
        )
        rows.append(row)
        if arguments.json is not None:
            figures = {"cores": os.cpu_count(), "rows": rows}
            write_json(arguments.json, figures)
    show(rows)


if __name__ == "__main__":
    main()
