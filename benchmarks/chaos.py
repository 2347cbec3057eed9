"""A queue of runs while its parts are killed: each run ends, and none runs twice.

``python -m benchmarks.chaos [--rounds 1000] [--nodes 3] [--every 15] [--seed 0] [--json FILE]``

A real SuperLink with a database, nodes, ServerApps and the queue's service, on this machine. Two
users keep 20 runs of FedAvg on digits in the queue, with priorities, some after others, some that
wait for nodes which never come until their timeout ends them, and some that are cancelled. All the
while a node, a ServerApp, the SuperLink or the service gets SIGKILL, or a ServerApp SIGSTOP. Once
so many rounds were trained, the kills end, and the queue has `DRAIN` seconds to become empty. As
root the second user is another user of the system; otherwise both are this one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sqlite3
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.figures import write_json
from flwr_distill.fleet.local_federation import LocalFederation, free_ports
from flwr_distill.fleet.queue.door import FILE, call
from flwr_distill.fleet.queue.entry import TOKEN, QueuedRun, QueueError, State
from flwr_distill.fleet.queue.file import MAX_ENDED, read_queue
from flwr_distill.fleet.servers import Addresses, serverapps_command, superlink_command
from flwr_distill.flower.bundle import app_bundle
from flwr_distill.flower.own_app import APP_DIR
from flwr_distill.node.processes import Process, kill_group, start_bound, stop
from flwr_distill.node.secret import appio_secret

IN_QUEUE = 20
AT_ONCE = 3
ROUNDS_OF_A_RUN = 25
TIMEOUT = 180.0
HANGS_FOR = 15.0
"""Timeout of a run that waits for nodes which never come."""
DRAIN = 600.0
BACK_AFTER = (0.0, 3.0)
"""Seconds for which a killed SuperLink or service is away."""
OTHER_USER = 65534
KILLS = {"node": 4, "ServerApp": 3, "ServerApp stopped": 1, "SuperLink": 2, "queue": 4}
"""What is killed, and how often of 14 times."""


class Federation(LocalFederation):
    """Nodes and a queue beside a SuperLink with a database, which ServerApps outlive."""

    def __init__(self, nodes: int, folder: Path, at_once: int = AT_ONCE) -> None:
        state = folder / "state"
        super().__init__(nodes, state, database=folder / "superlink.db", cwd=folder)
        self.folder = folder
        self.database = folder / "superlink.db"
        self._ports = free_ports(3)
        self._at_once = at_once
        self._queue: Process | None = None

    def start(self, **settings: Any) -> None:
        """Start all processes."""
        super().start(**settings)
        self.start_queue()

    def stop(self) -> None:
        """End all processes, the queue first."""
        if self._queue is not None:
            stop([self._queue])
            self._queue = None
        for app in self.serverapps():  # one that is stopped would stay
            with suppress(psutil.NoSuchProcess):
                app.kill()
        super().stop()

    def start_queue(self) -> None:
        """Start the queue's service, and wait until it answers."""
        command = [sys.executable, "-P", "-m", "flwr_distill.command", "queue", "serve"]
        command += ["--superlink", self.control_address, "--insecure"]
        command += ["--at-once", str(self._at_once), "--state-dir", str(self.state_dir)]
        self._queue = start_bound(command, log=self.state_dir / "queue.log", env=self.env)
        deadline = time.monotonic() + 60
        while True:
            try:
                call(self.state_dir, call="list", ended=0)
            except QueueError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                return

    def kill_queue(self) -> None:
        """Kill the queue's service with SIGKILL."""
        assert self._queue is not None
        kill_group(self._queue)

    def kill_superlink(self) -> None:
        """Kill the SuperLink with SIGKILL."""
        assert self._superlink is not None
        kill_group(self._superlink)

    def start_superlink(self) -> None:
        """Start a killed SuperLink again, and wait until it answers."""
        self._start_superlink()
        self._wait_for_superlink(60.0)

    def serverapps(self) -> list[psutil.Process]:
        """ServerApps of runs, which the last of the nurseries forks."""
        apps: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess, IndexError):  # no nursery, no apps
            apps += psutil.Process(self.nursery_pids[-1]).children()
        return apps

    def _start_superlink(self) -> None:
        fleet, *others = self._ports
        addresses = Addresses.beside(f"127.0.0.1:{fleet}", *others)
        self.fleet_address, self.control_address = addresses.fleet, addresses.control
        secret = appio_secret(self.state_dir)
        command = superlink_command(addresses, secret, None, self._database)
        self._superlink = self._start_server(command)
        if self._serverapps is None:
            self._serverapps_command = serverapps_command(addresses, secret, os.getpid())
            self._serverapps = self._start_server(self._serverapps_command)


class User:
    """Makes calls to a queue in a process of its own, as a user of the system."""

    def __init__(self, uid: int) -> None:
        self.uid = uid
        self.ids: list[int] = []
        fork = multiprocessing.get_context("fork")
        self._line, end = fork.Pipe()
        fork.Process(target=_calls, args=(uid, end), daemon=True).start()

    def call(self, folder: Path, bundle: bytes = b"", **request: Any) -> Any:
        """As `door.call`, also while the service is away for a moment."""
        deadline = time.monotonic() + 60
        while True:
            self._line.send((folder, bundle, request))
            answer, text = self._line.recv()
            if not text:
                return answer
            away = "no queue is served" in text or "does not answer" in text
            if not away or time.monotonic() > deadline:
                raise QueueError(text)
            time.sleep(random.uniform(0.2, 0.5))


def _calls(uid: int, line: Connection) -> None:
    if uid != os.getuid():
        os.setuid(uid)  # but in root's group, as the folder of the queue
    while True:
        try:
            folder, bundle, request = line.recv()
        except EOFError:
            return
        try:
            line.send((call(folder, bundle, **request), ""))
        except QueueError as error:
            line.send((None, str(error)))


class Chaos:
    """Fills a queue, and kills its parts; `counts` has what was done."""

    def __init__(self, federation: Federation, users: Sequence[User], draw: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self._federation = federation
        self._users = users
        self._draw = draw
        self._bundle = app_bundle(APP_DIR, {})

    @property
    def runs(self) -> list[QueuedRun]:
        """All runs of the queue."""
        return read_queue(self._federation.state_dir / FILE, ended=MAX_ENDED)

    @property
    def rounds(self) -> int:
        """Rounds that were trained: those with a row in the files of runs."""
        count = 0
        for file in (self._federation.folder / "runs").glob("*/metrics.jsonl"):
            lines = file.read_text("utf-8").splitlines()
            count += sum('"round": 0,' not in line for line in lines)
        return count

    def fill(self) -> None:
        """Have each user fill its half of the queue."""
        unfinished = [run.id for run in self.runs if not run.state.ended]
        for user in self._users:
            own = [number for number in user.ids if number in unfinished]
            for _ in range(IN_QUEUE // len(self._users) - len(own)):
                own.append(self._submit(user, own))
                user.ids.append(own[-1])

    def cancel(self) -> None:
        """Have one user cancel a run of its own, and the other try."""
        owner, other = self._draw.sample(self._users, 2)
        number = self._draw.choice(owner.ids[-5:])
        folder = self._federation.state_dir
        if other.uid not in (owner.uid, 0):
            try:
                other.call(folder, call="cancel", id=number)
            except QueueError:
                self.counts["refused: another's run"] += 1
            else:
                self.counts["WRONG: cancelled another's run"] += 1
        with suppress(QueueError):  # it may have ended
            owner.call(folder, call="cancel", id=number)
            self.counts["cancelled"] += 1

    def kill(self) -> None:
        """Kill one part, and start it again."""
        what = self._draw.choices(list(KILLS), list(KILLS.values()))[0]
        federation, away = self._federation, self._draw.uniform(*BACK_AFTER)
        if what == "queue":
            federation.kill_queue()
            time.sleep(away)
            federation.start_queue()
        elif what == "SuperLink":
            federation.kill_superlink()
            time.sleep(away)
            federation.start_superlink()
        elif what == "node":
            self._draw.choice(federation.nodes).kill()
        else:
            number = signal.SIGSTOP if what == "ServerApp stopped" else signal.SIGKILL
            apps = federation.serverapps()
            if not apps:
                return
            with suppress(psutil.NoSuchProcess):
                self._draw.choice(apps).send_signal(number)
        self.counts[f"killed: {what}"] += 1

    def _submit(self, user: User, own: list[int]) -> int:
        config: dict[str, Any] = {"strategy": "fedavg", "num-rounds": ROUNDS_OF_A_RUN}
        config |= {"min-nodes": 2, "phase-timeout": 60.0, "patience-failed": 5}
        order = {"run_config": config, "priority": self._draw.randint(-2, 2), "timeout": TIMEOUT}
        if self._draw.random() < 0.1:
            config["min-nodes"] = 1000
            order["timeout"] = HANGS_FOR
            self.counts["submitted: hangs"] += 1
        elif own and self._draw.random() < 0.15:
            order["after"] = own[-1]
        self.counts["submitted"] += 1
        with suppress(QueueError):
            return int(user.call(self._federation.state_dir, self._bundle, call="add", order=order))
        order.pop("after", None)  # that run has just ended otherwise
        return int(user.call(self._federation.state_dir, self._bundle, call="add", order=order))


def started_twice(queue: Path, database: Path) -> tuple[int, int]:
    """Runs of a queue that a SuperLink started more than once, and runs that are in no queue."""
    with closing(sqlite3.connect(database)) as link, closing(sqlite3.connect(queue)) as file:
        rows = [json.loads(row[0]) for row in link.execute("SELECT override_config FROM run")]
        tokens = {row[0] for row in file.execute("SELECT token FROM runs")}
    counts = Counter(row.get(TOKEN) for row in rows)
    return sum(count > 1 for count in counts.values()), len(counts.keys() - tokens)


def longest_gap(runs: Sequence[QueuedRun]) -> float:
    """Longest time in seconds in which no run started or ended."""
    times = sorted({t for run in runs for t in (run.started, run.since) if t})
    return max((b - a for a, b in pairwise(times)), default=0.0)


def chaos(rounds: int, nodes: int, every: float, seed: int, console: Console) -> dict[str, Any]:
    """Run the chaos, and return what came of it."""
    draw = random.Random(seed)
    other = OTHER_USER if os.getuid() == 0 else os.getuid()
    users = [User(os.getuid()), User(other)]
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        folder.chmod(0o750)
        with Federation(nodes, folder) as federation:
            start = time.monotonic()
            work = Chaos(federation, users, draw)
            next_kill, shown = start + every, -1
            while (trained := work.rounds) < rounds:
                work.fill()
                federation.restart_dead_nodes()
                if time.monotonic() > next_kill:
                    work.kill()
                    if draw.random() < 0.2:
                        work.cancel()
                    next_kill = time.monotonic() + draw.uniform(0.5, 1.5) * every
                if trained // 25 > shown:
                    shown = trained // 25
                    console.print(f"{time.monotonic() - start:.0f} s: {trained} rounds")
                time.sleep(draw.uniform(0.3, 0.7))
            killing = time.monotonic() - start
            while any(not run.state.ended for run in work.runs):
                federation.restart_dead_nodes()
                if time.monotonic() - start - killing > DRAIN:
                    break
                time.sleep(draw.uniform(0.3, 0.7))
            drained = time.monotonic() - start - killing
            runs, trained = work.runs, work.rounds
            twice, strange = started_twice(federation.state_dir / FILE, federation.database)
    waits = [run.started - run.submitted for run in runs if run.started]
    return {
        "rounds": trained,
        "seconds": round(killing, 1),
        "seconds to drain": round(drained, 1),
        "users": len({user.uid for user in users}),
        "runs": len(runs),
        **{f"runs {state}": sum(run.state is state for run in runs) for state in State},
        "started twice": twice,
        "in no queue": strange,
        "median wait, s": round(statistics.median(waits), 1),
        "maximum wait, s": round(max(waits), 1),
        "longest time without a start or an end, s": round(longest_gap(runs), 1),
        **dict(sorted(work.counts.items())),
        "why runs failed": dict(
            Counter(run.why[:80] for run in runs if run.state is State.FAILED).most_common(10)
        ),
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--every", type=float, default=15.0, help="Seconds between kills.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    console = Console()
    found = chaos(arguments.rounds, arguments.nodes, arguments.every, arguments.seed, console)
    table = Table("chaos in a queue of runs", "")
    for key, value in found.items():
        table.add_row(key, json.dumps(value) if isinstance(value, dict) else str(value))
    console.print(table)
    write_json(arguments.json, found)
    blocked = sum(found[f"runs {state}"] for state in State if not state.ended)
    if blocked or found["started twice"] or any(key.startswith("WRONG") for key in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
