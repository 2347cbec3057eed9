"""Faults in the midst of runs of real processes: each run ends, with everyone else's work.

All faults of a strategy come in one run, each in a round of its own, in this order. After a round
the run waits until the federation is whole again, so that each fault's cost is measured.
"""

import json
import os
import re
import signal
import threading
import time
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path
from statistics import median

import grpc
import pytest

from flwr_distill.fleet.submission import RunError
from flwr_distill.flower.control import SuperLinkError
from flwr_distill.strategies.fedhead.method import AGGREGATE_SECTOR, DISTILL_SECTOR, TRAIN_SECTOR
from flwr_distill.strategies.fedlgd.method import TRAIN_VIRTUAL
from flwr_distill.strategies.hfldd.method import DISTILL, NUM_PARCELS, RECEIVE, TRAIN_POOL
from tests.waiting import wait_until


class Fault(Enum):
    """What goes wrong."""

    MEMBER_DIES_DISTILLING = auto()
    NAN_UPDATE = auto()
    DISK_FULL = auto()
    WRONG_SHAPE = auto()
    CLOCK_SKEW = auto()
    EXECUTOR_CHILD_DIES = auto()
    REPLY_LATE = auto()
    LINK_CUT_AND_HEALED = auto()
    NODE_DIES_BEFORE_WORK = auto()
    NODE_DIES_DURING_WORK = auto()
    NODE_DIES_AFTER_WORK = auto()
    LEADER_DIES_AVERAGING = auto()
    LEADER_DIES_DISTILLING = auto()
    SUPERLINK_RESTARTS = auto()
    SERVERAPP_DIES = auto()


TRAINING = {"hfldd": TRAIN_POOL, "fedhead": TRAIN_SECTOR, "fedlgd": TRAIN_VIRTUAL}
"""The phase in which nodes train; ``train`` in all others."""
OF_LEADERS = {
    Fault.LEADER_DIES_AVERAGING: AGGREGATE_SECTOR,
    Fault.LEADER_DIES_DISTILLING: DISTILL_SECTOR,
}
"""FedHEAD's, each with the phase that it comes in."""
OF_ONE = {Fault.MEMBER_DIES_DISTILLING: "hfldd", **dict.fromkeys(OF_LEADERS, "fedhead")}
"""Faults that one strategy alone can have."""
FORMING = {Fault.MEMBER_DIES_DISTILLING: DISTILL, Fault.DISK_FULL: RECEIVE}
"""HFLDD's as its clusters form, in the first rounds, with the phases that they come in.

Its heads write when they receive, in the second round from the member that is back.
"""
DEADLY = {fault for fault in Fault if "_DIES_" in fault.name}
OF_SERVERS = {Fault.SUPERLINK_RESTARTS, Fault.SERVERAPP_DIES}
HARMLESS = {
    *((strategy, Fault.CLOCK_SKEW) for strategy in ("hfldd", "fedhead", "cadis", "fedlgd")),
    ("cadis", Fault.DISK_FULL),  # its nodes write nothing
}
LOGGED = {
    Fault.NAN_UPDATE: "NaN",
    Fault.DISK_FULL: "No space left",
    Fault.WRONG_SHAPE: "model has|broadcast",
    Fault.EXECUTOR_CHILD_DIES: "the ClientApp process died: signal SIGKILL",
    Fault.REPLY_LATE: "did not reply within",
    Fault.LINK_CUT_AND_HEALED: "did not reply within",
    **dict.fromkeys(DEADLY, "did not reply within"),
}
"""What the server's log says with the node's name."""

DEADLINE, SLACK = 12.0, 10.0
CLEAN = 2
"""Rounds before the first fault; between two faults there is one more."""
STRATEGIES = {
    "hfldd": {
        "partition.classes": 5,
        "hfldd.groups": 2,
        "hfldd.distill-steps": 5,
        "hfldd.auxiliary-size": 50,
    },
    "fedhead": {
        "fedhead.sectors": 2,
        "fedhead.distill-epochs": 2,
        "fedhead.least-classes": 0.0,
        "fedhead.least-gain": 0.0,
    },
    "cadis": {},
    "fedlgd": {
        "fedlgd.per-class": 2,
        "fedlgd.first-steps": 5,
        "fedlgd.refine-steps": 2,
        "fedlgd.every": 2,
        "fedlgd.global-per-class": 2,
        "fedlgd.global-steps": 3,
    },
}
USUAL = {
    "hfldd": {
        Fault.MEMBER_DIES_DISTILLING,
        Fault.NODE_DIES_AFTER_WORK,
        Fault.SUPERLINK_RESTARTS,
        Fault.WRONG_SHAPE,
    },
    "fedhead": {
        Fault.NODE_DIES_DURING_WORK,
        Fault.NAN_UPDATE,
        Fault.DISK_FULL,
        Fault.LEADER_DIES_AVERAGING,
    },
    "cadis": {Fault.EXECUTOR_CHILD_DIES, Fault.LINK_CUT_AND_HEALED, Fault.CLOCK_SKEW},
    "fedlgd": {Fault.NODE_DIES_BEFORE_WORK, Fault.REPLY_LATE, Fault.SERVERAPP_DIES},
}
"""Every fault and every strategy once; the others make the whole matrix."""
DEPLOYED = {
    ("hfldd", Fault.SUPERLINK_RESTARTS): ["a killed SuperLink comes back in a run"],
    ("fedlgd", Fault.SERVERAPP_DIES): ["a killed ServerApp's run is resumed"],
}
"""What of it is tried on other Flowers, too."""


class Run:
    """A run with a fault in every other round from `CLEAN` + 1 on, but for those of `FORMING`.

    By round: `fault_of`, the Flower id of its `victims`, its `seconds`, and the `outage` of the
    SuperLink, in which no phase can end. `numbers` are nodes' numbers by Flower's ids, of which a
    node gets a new one when it comes back.
    """

    def __init__(self, federation, app, strategy, faults, runs_dir):
        self.federation = federation
        self.strategy = strategy
        self.phase = TRAINING.get(strategy, "train")
        early = [fault for fault in FORMING if strategy == "hfldd" and fault in faults]
        later = [fault for fault in faults if fault not in early]
        self.fault_of = dict(enumerate(early, 1))
        self.fault_of |= {CLEAN + 1 + 2 * i: fault for i, fault in enumerate(later)}
        self.rounds = CLEAN + 2 * len(faults)
        self._place = {
            number: f"{DISTILL}.0"  # it does not say in which round
            if fault is Fault.MEMBER_DIES_DISTILLING
            else f"{(FORMING if fault in early else OF_LEADERS).get(fault, self.phase)}.{number}"
            for number, fault in self.fault_of.items()
        }
        self.victims, self.numbers, self.seconds, self.outage = {}, {}, {}, {}
        self.status = "broken off"
        self._app, self._runs_dir = app, runs_dir
        self._faults = federation.faults
        self._server = 0

    @property
    def clean(self):
        """Seconds of a round without a fault, the first not counted."""
        others = set(range(2, self.rounds + 1)) - self.fault_of.keys()
        return median(self.seconds[number] for number in others)

    @property
    def folder(self):
        """Of the run's results."""
        (folder,) = self._runs_dir.iterdir()
        return folder

    def play(self):
        """Submit the run and see to it until it is over, or stop it."""
        try:
            self._play()
        except BaseException:
            with self.federation._control() as link, suppress(grpc.RpcError):
                link.stop_run(self._run_id)
            raise

    def _play(self):
        for file in self._faults.iterdir():
            file.unlink()
        self._make_whole()
        self._submit()
        for number in range(self.rounds + 1):
            began = time.monotonic()
            if fault := self.fault_of.get(number):
                self._see_to(fault, number)
            self._server = int(self._await(f"over.{number}").read_text())
            self.seconds[number] = time.monotonic() - began
            self._recover(fault, number)
            if following := self.fault_of.get(number + 1):
                self._prepare(following, number + 1)
            (self._faults / f"go.{number}").touch()
        self._submitted.join(90)
        with self.federation._control() as link:
            self.status = link.run_status(self._run_id, settle=60).status

    def _submit(self, **more):
        settings = {
            "strategy": self.strategy,
            "num-rounds": self.rounds,
            "min-nodes": len(self.federation.nodes),
            "phase-timeout": DEADLINE,
            "train.local-epochs": 1,
            "runs-dir": str(self._runs_dir),
            **STRATEGIES[self.strategy],
            **more,
        }

        def line(text):
            if found := re.search(r"started run (\d+)", text):
                self._run_id = int(found[1])

        def submit():
            with suppress(RunError, SuperLinkError):  # its log ends with the SuperLink
                self.federation.run(self._app, settings, on_line=line, timeout=380)

        self._submitted = threading.Thread(target=submit, daemon=True)
        self._submitted.start()

    def _await(self, name, seconds=180):
        log = self.federation.server_log
        return wait_until(
            lambda: list(self._faults.glob(name)),
            seconds,
            lambda: f"{name} does not come\n{log.read_text(errors='replace')[-6000:]}",
        )[0]

    def _prepare(self, fault, number):
        if fault is Fault.CLOCK_SKEW:
            self.federation.set_clock(0, late=True)
            self._make_whole()
            self.victims[number] = self.federation.status(0)["online"]
        else:
            (self._faults / self._place[number]).write_text(fault.name)

    def _see_to(self, fault, number):
        """Note whom a fault befalls, and break what is not a node."""
        if fault is Fault.CLOCK_SKEW:
            return
        self.victims[number] = int(self._await(f"{self._place[number]}.*").suffix[1:])
        if fault is Fault.SUPERLINK_RESTARTS:
            began = time.monotonic()
            self.federation.restart_superlink()
            self.outage[number] = time.monotonic() - began
        if fault is Fault.SERVERAPP_DIES:
            os.kill(self._server, signal.SIGKILL)
            self._submit(resume="latest")

    def _recover(self, fault, number):
        """Undo a fault and wait until all nodes are there."""
        if fault is None:
            return
        victim = self.victims[number]
        if fault is Fault.CLOCK_SKEW:
            self.federation.set_clock(0, late=False)
        elif fault is Fault.REPLY_LATE:
            self.federation.go_on(self.numbers[victim])
        elif fault is Fault.LINK_CUT_AND_HEALED:
            self.federation.hosts.connect(self.numbers[victim])
        self._make_whole(ghosts=[victim] if fault in DEADLY else [])

    def _make_whole(self, ghosts=()):
        self.federation.make_whole(ghosts)
        self.numbers |= self.federation.online()


def impossible(fault, federation):
    """Why a fault cannot be made here, if it cannot."""
    if fault is Fault.LINK_CUT_AND_HEALED and federation.hosts is None:
        return "nodes have hosts of their own only for root, with `ip`"
    if fault is Fault.DISK_FULL and not federation.small_disks:
        return "nodes have small disks of their own only for root"
    if fault is Fault.CLOCK_SKEW and federation.late_clock is None:
        return "the late clock needs a C compiler, `cc`"
    return ""


@pytest.fixture(scope="module")
def run_of(request, federation, faulty_app, tmp_path_factory):
    """Play a strategy's run, once, with the faults of the tests that were selected."""
    played = {}

    def play(strategy):
        if strategy not in played:
            params = [i.callspec.params for i in request.session.items if i.path == request.path]
            faults = [f for f in Fault if {"strategy": strategy, "fault": f} in params]
            faults = [fault for fault in faults if not impossible(fault, federation)]
            folder = tmp_path_factory.mktemp(strategy)
            played[strategy] = Run(federation, faulty_app, strategy, faults, folder)
            played[strategy].play()
        return played[strategy]

    yield play
    if file := os.environ.get("FAULTS_TABLE"):
        whole = {name: run for name, run in played.items() if run.status != "broken off"}
        Path(file).write_text(table(whole))


def table(played):
    """What each fault cost: seconds more than a round without one, as Markdown."""
    cells = {
        (fault, strategy): f"{run.seconds[number] - run.clean:+.1f}"
        for strategy, run in played.items()
        for number, fault in run.fault_of.items()
    }
    head = ["", *(f"{strategy} ({run.clean:.1f} s)" for strategy, run in played.items())]
    rows = [
        [fault.name, *(cells.get((fault, strategy), "") for strategy in played)]
        for fault in Fault
        if any((fault, strategy) in cells for strategy in played)
    ]
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


PAIRS = [
    pytest.param(
        strategy,
        fault,
        marks=[
            *(() if fault in USUAL[strategy] else [pytest.mark.all_faults]),
            *(pytest.mark.deployment(what) for what in DEPLOYED.get((strategy, fault), ())),
        ],
        id=f"{strategy}-{fault.name}",
    )
    for strategy in STRATEGIES
    for fault in Fault
    if OF_ONE.get(fault, strategy) == strategy
]


@pytest.mark.faults
@pytest.mark.timeout(480)
@pytest.mark.parametrize(("strategy", "fault"), PAIRS)
def test_the_run_ends_with_everyone_elses_work_and_says_who_failed(
    run_of, federation, strategy, fault
):
    if reason := impossible(fault, federation):
        pytest.skip(reason)
    run = run_of(strategy)
    assert run.status == "finished:completed"
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == list(range(run.rounds + 1))
    (number,) = (n for n, befallen in run.fault_of.items() if befallen is fault)
    lines = [json.loads(line) for line in (run.folder / "journal.jsonl").read_text().splitlines()]
    for line in lines:
        longest = DEADLINE + SLACK + run.outage.get(line["round"], 0)
        assert line.get("seconds", 0) < longest, line
    victim = run.victims[number]
    requested_next, trained_next = who_trained(run, lines, number + 1)
    if fault in OF_SERVERS:  # a SuperLink that is not back in time costs the round
        assert rows[number + 1]["loss"] != rows[number - 1]["loss"]
        assert len(trained_next) == requested_next > 0
        return
    assert rows[number]["loss"] != rows[number - 1]["loss"]
    requested, trained = who_trained(run, lines, number)
    assert len(trained - {victim}) >= requested - 1 > 0
    if fault is Fault.MEMBER_DIES_DISTILLING:  # its cluster is completed when it is back
        sent = {n: pooled(lines, n) for n in range(number, run.rounds + 1)}
        assert sent[number] < max(sent.values())
    if strategy != "hfldd":  # there heads alone train
        assert run.numbers[victim] in {run.numbers[node] for node in trained_next}
    if (strategy, fault) in HARMLESS:
        assert victim in trained or strategy == "hfldd"
    else:
        warnings = [
            line["warning"] for line in lines if line["round"] == number and "warning" in line
        ]
        name = f"node-{run.numbers[victim]}"
        assert any(name in text and re.search(LOGGED[fault], text) for text in warnings), warnings


def who_trained(run, lines, number):
    """How many nodes were asked to train in a round, and who answered."""
    entry = next(
        line for line in lines if line["round"] == number and line.get("phase") == run.phase
    )
    return entry["asked"], {int(node) for node in entry["nodes"]}


def pooled(lines, number):
    """Members whose virtual data heads train on in a round."""
    (entry,) = (
        line for line in lines if line["round"] == number and line.get("phase") == TRAIN_POOL
    )
    return sum(node[NUM_PARCELS] for node in entry["nodes"].values())
