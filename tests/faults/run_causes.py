"""Faults in the midst of a run, one function each: it breaks something, and repairs it.

A cause starts a run by the command that users type, and yields once the fault is there. After that
it repairs what it broke. All are on one federation of real processes, whose nodes reach the
SuperLink over links of their own.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import yaml
from sklearn.datasets import load_digits

from flwr_distill.flower.control import open_control
from flwr_distill.node.processes import kill_group, start_bound, stop
from flwr_distill.protocol.meeting import DESCRIBE
from flwr_distill.strategies.fedhead.method import AGGREGATE_SECTOR, DISTILL_SECTOR, TRAIN_SECTOR
from flwr_distill.strategies.hfldd.method import DISTILL, LABEL_KNOWLEDGE, RECEIVE, TRAIN_POOL
from tests.faults.causes import fill, small_disk
from tests.faults.conftest import Federation, app_with_faults
from tests.proxies import Wire

NODES = 3
DEADLINE = 15.0
"""Seconds of a phase."""
COMMAND = """
import sys
from pathlib import Path
import flwr_distill.cli.run
flwr_distill.cli.run.APP_DIR = Path(sys.argv.pop(1))
from flwr_distill.command import main
main()
"""
"""`flwr-distill run` of another app than ours."""
SETTINGS = {
    "strategy": "fedavg",
    "num-rounds": 3,
    "min-nodes": NODES,
    "phase-timeout": DEADLINE,
    "train.local-epochs": 1,
}


class WiredFederation(Federation):
    """Each node has a link of its own, and settings of its own."""

    def __init__(self, folder):
        self.wires = {}
        self.own_settings = {}
        self.paths = {}
        super().__init__(folder, num_nodes=NODES)

    def node_command(self, settings):
        index = int(settings.parent.name.removeprefix("node-"))
        if index not in self.wires:
            self.wires[index] = Wire(self.fleet_address)
        values = yaml.safe_load(settings.read_text()) | self.own_settings.get(index, {})
        values |= {"superlink": self.wires[index].address, "release-after": 3600.0}
        settings.write_text(yaml.safe_dump(values))
        command = super().node_command(settings)
        if index in self.paths:  # of Python, before its own
            command = ["env", f"PYTHONPATH={self.paths[index]}", *command]
        return command

    def stop(self):
        super().stop()
        for wire in self.wires.values():
            wire.close()

    def set_node(self, index, **settings):
        """Restart a node with these settings of its own; without any, as it was."""
        self.own_settings[index] = {key.replace("_", "-"): v for key, v in settings.items()}
        self.nodes[index].restart()
        self.make_whole()

    def stop_runs(self):
        with open_control(self.control_address) as control:
            control.wait(60)
            for run in control.runs(unfinished=True):
                control.stop_run(run)

    def signal(self, index, number):
        """Send a signal to all of a node's processes, the SuperNode first."""
        status = self.status(index)
        for part in ("supernode", "executor", "worker", "nursery", "pid"):
            with contextlib.suppress(ProcessLookupError, KeyError):
                os.kill(status[part], number)


class Play:
    """A run that a cause breaks: its process, its folder, and when the fault came."""

    def __init__(self, federation, folder, apps):
        self.federation = federation
        self.folder = folder
        self.apps = apps
        self.log = folder / "run.log"
        self.process = None
        self.victim = 0
        self.ghost = None
        self.patience = 180.0
        """Seconds from the fault to the end of the run, at most."""
        self.broken_at = 0.0

    def app(self, **modules):
        """An app folder with these modules of the folder ``app`` as its two sides."""
        key = tuple(sorted(modules.items()))
        if key not in self.apps:
            folder = self.folder / f"app-{len(self.apps)}"
            folder.mkdir()
            self.apps[key] = app_with_faults(folder, **modules)
        return self.apps[key]

    @contextlib.contextmanager
    def serving(self, *arguments):
        """Run a command of ours meanwhile."""
        command = ["flwr-distill", *arguments]
        process = start_bound(command, env=self.federation.env, log=self.folder / "serving.log")
        try:
            yield
        finally:
            stop([process])

    def start(self, *, app=None, queued=None, command_options=(), **settings):
        """Submit a run by `flwr-distill run`; keys have _ for - and __ for a dot.

        With a folder `queued`, it goes into the queue there, and another command waits for it.
        """
        for file in self.federation.faults.iterdir():
            file.unlink()
        named = {k.replace("__", ".").replace("_", "-"): v for k, v in settings.items()}
        config = SETTINGS | {"runs-dir": str(self.runs_dir)} | named
        text = " ".join(f"{key}={_toml(value)}" for key, value in config.items())
        command = [sys.executable, "-c", COMMAND, str(app or self.app()), "run", "-c", text]
        if queued:
            wait_for_queue(queued)
            command += ["--queue", "--state-dir", str(queued), *command_options]
            subprocess.run(command, env=self.federation.env, check=True, timeout=60)
            command = ["flwr-distill", "queue", "wait", "1", "--state-dir", str(queued)]
        else:
            command += ["--insecure", "--superlink", self.federation.control_address]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=self.federation.env, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    @property
    def runs_dir(self):
        return self.folder / "runs"

    @property
    def run_folder(self):
        folders = sorted(self.runs_dir.iterdir()) if self.runs_dir.exists() else []
        return folders[0] if folders else None

    def arm(self, fault, phase, number=0):
        """Have the first node that comes to a phase of a round take a fault."""
        (self.federation.faults / f"{phase}.{number}").write_text(fault)

    def taken(self, phase, number=0, seconds=60):
        """Wait until a node has taken a fault; it is the victim."""
        file = self.found(f"{phase}.{number}.*", seconds)
        self.broke()
        self.ghost = int(file.suffix[1:])
        self.victim = self.federation.online()[self.ghost]

    def found(self, name, seconds=60):
        deadline = time.monotonic() + seconds
        while not (files := list(self.federation.faults.glob(name))):
            assert time.monotonic() < deadline, f"{name} does not come\n{self.log.read_text()}"
            time.sleep(0.05)
        return files[0]

    def after_round(self, number):
        """Let the run continue to the end of a round; return the ServerApp's pid."""
        for earlier in range(number):
            (self.federation.faults / f"go.{earlier}").touch()
        return int(self.found(f"over.{number}").read_text())

    def release(self):
        """Let all rounds continue."""
        for number in range(100):
            (self.federation.faults / f"go.{number}").touch()

    def broke(self):
        """Now the fault is there."""
        self.broken_at = time.monotonic()

    def end(self):
        """End what a failed test has left."""
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.federation.stop_runs()


def wait_for_queue(folder, seconds=60):
    deadline = time.monotonic() + seconds
    while not list(folder.glob("*.sock*")) and time.monotonic() < deadline:
        time.sleep(0.1)


def _toml(value):
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def server_import_fails(play):
    play.start(app=play.app(server="faulty.needs_a_package"))
    play.broke()
    yield


def node_import_fails(play):
    server = "flwr_distill.server.app"
    play.start(app=play.app(server=server, client="faulty.needs_a_package"))
    play.broke()
    yield


def serverapp_killed(play):
    play.start()
    os.kill(play.after_round(1), signal.SIGKILL)
    play.broke()
    yield


def serverapp_memory(play):
    play.start(app=play.app(server="faulty.server_out_of_memory"))
    play.broke()
    yield


def serverapp_hangs(play):
    """In the queue, whose timeout ends it."""
    control = play.federation.control_address
    state_dir = play.folder / "queue"
    state_dir.mkdir()
    serve = ["queue", "serve", "--insecure", "--superlink", control]
    with play.serving(*serve, "--state-dir", str(state_dir)):
        app = play.app(server="faulty.server_hangs")
        play.start(app=app, queued=state_dir, command_options=("--timeout", "25"))
        play.broke()
        yield


def node_killed(strategy, phase, number=0, fault="NODE_DIES_DURING_WORK", **settings):
    """A cause: a node is killed in a phase, and its restart policy starts it again."""

    def cause(play):
        play.start(strategy=strategy, min_nodes=2, num_rounds=2, **settings)
        play.arm(fault, phase, number)
        play.release()
        play.taken(phase, number)
        node = play.federation.nodes[play.victim]
        node.process.wait(10)
        node.start()
        yield
        play.federation.make_whole([play.ghost])

    return cause


def worker_takes(fault):
    """A cause: a node's app takes a fault as it trains."""

    def cause(play):
        play.start()
        play.arm(fault, "train", 2)
        play.release()
        play.taken("train", 2)
        yield

    return cause


def policy(**rules):
    """A cause: the policy of a node refuses the run."""

    def cause(play):
        play.federation.set_node(0, policy=rules)
        play.start(min_nodes=2)
        play.release()
        play.broke()
        yield
        play.federation.set_node(0)

    return cause


def nobody_answers(play):
    play.start()
    play.after_round(1)
    for index in range(NODES):
        play.federation.signal(index, signal.SIGSTOP)
    play.release()
    play.broke()
    yield
    for index in range(NODES):
        play.federation.signal(index, signal.SIGCONT)


def results_disk_full(play):
    with small_disk(play.runs_dir, "2m"):
        play.start()
        play.after_round(1)
        fill(play.runs_dir)
        play.release()
        play.broke()
        yield


def same_name(play):
    for index in (0, 1):
        play.federation.set_node(index, name="ward-3")
    play.start()
    play.release()
    play.broke()
    yield
    for index in (0, 1):
        play.federation.set_node(index)


def data_gone(play):
    for index, file in enumerate(own_data(play.folder)):
        own = {"data": str(file), "partition_id": None, "num_partitions": None}
        play.federation.set_node(index, name=f"node-{index}", **own)
    shape = {"private__shape": "1x8x8", "private__num_classes": 10}
    play.start(dataset="private", fraction_evaluate=1.0, min_nodes=2, **shape)
    play.arm("DATA_GONE", "train", 2)
    play.taken("train", 2)
    yield
    for index in range(NODES):
        play.federation.set_node(index)


def own_data(folder):
    """A file of digits for each node, in a folder of its own."""
    digits = load_digits()
    images = (digits.images / 16 * 255).astype(np.uint8)
    folders = [folder / f"data-{index}" for index in range(NODES)]
    for index, own in enumerate(folders):
        own.mkdir()
        part = slice(index * 500, (index + 1) * 500)
        np.savez(own / "digits.npz", images=images[part], labels=digits.target[part])
    return [own / "digits.npz" for own in folders]


def superlink_killed(play):
    """It is back after 5 s, with its database."""
    play.start()
    play.after_round(1)
    play.broke()
    kill_group(play.federation._superlink)
    play.release()
    time.sleep(5)
    play.federation._start_superlink()
    yield


def superlink_gone(play):
    play.start()
    play.after_round(1)
    play.broke()
    kill_group(play.federation._superlink)
    play.release()
    yield
    play.federation._start_superlink()
    play.federation.stop_runs()


def half_a_message(play):
    """Of a reply with a model of 1.3 MB, 300 KB arrive."""
    play.start(model="convnet3")
    play.after_round(1)
    play.federation.wires[0].break_after(300_000)
    play.release()
    play.broke()
    yield


def network_cut(seconds):
    """A cause: a node's packets vanish for so long."""

    def cause(play):
        play.patience += seconds
        play.start(min_nodes=2, num_rounds=max(3, int(1.2 * seconds / DEADLINE)))
        play.after_round(1)
        wire = play.federation.wires[0]
        wire.cut()
        timer = threading.Timer(seconds, wire.heal)
        timer.start()
        play.release()
        play.broke()
        yield
        timer.join()
        wire.heal()

    return cause


def another_version(play):
    """What Python says of our package on a node is that of an older one."""
    info = play.folder / "older" / "flwr_distill-0.0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flwr-distill\nVersion: 0.0.1\n")
    play.federation.paths[0] = info.parent
    play.federation.set_node(0)
    play.start()
    play.release()
    play.broke()
    yield
    del play.federation.paths[0]
    play.federation.set_node(0)


@dataclass(frozen=True)
class RunFault:
    """A cause, and what one line on each side must name: what is broken, and what repairs it."""

    cause: Callable
    server: tuple[str, ...]
    site: tuple[str, ...] = ()
    """Empty where no node is concerned, or none can speak."""
    code: int | None = 0
    """Exit code of the command; None where it depends on what the others had done by then."""
    state: str = ""
    """By `flwr-distill runs`, if it is not what the exit code says."""
    within: float = 30.0
    journal: bool = True
    """Whether the journal has the server's line: not of a ServerApp that is gone, or hangs."""
    report: bool = True
    """Whether there is a report: not where it cannot be written."""


SMALL_HFLDD = {
    "partition__classes": 5,
    "hfldd__groups": 2,
    "hfldd__distill_steps": 5,
    "hfldd__auxiliary_size": 50,
}
SMALL_FEDHEAD = {
    "fedhead__sectors": 1,
    "fedhead__distill_epochs": 2,
    "fedhead__least_classes": 0.0,
    "fedhead__least_gain": 0.0,
}
BEFORE = "NODE_DIES_BEFORE_WORK"
PHASES = {
    "nodes say who they are": node_killed("fedavg", DESCRIBE, fault=BEFORE),
    "nodes train": node_killed("fedavg", "train", 1),
    "nodes evaluate": node_killed("fedavg", "evaluate", 1, BEFORE, fraction_evaluate=1.0),
    "nodes send soft labels": node_killed("hfldd", LABEL_KNOWLEDGE, **SMALL_HFLDD),
    "members distil": node_killed("hfldd", DISTILL, **SMALL_HFLDD),
    "heads receive": node_killed("hfldd", RECEIVE, fault=BEFORE, **SMALL_HFLDD),
    "heads train": node_killed("hfldd", TRAIN_POOL, 1, **SMALL_HFLDD),
    "a sector trains": node_killed("fedhead", TRAIN_SECTOR, 1, **SMALL_FEDHEAD),
    "a leader averages": node_killed("fedhead", AGGREGATE_SECTOR, 1, BEFORE, **SMALL_FEDHEAD),
    "a leader distils": node_killed("fedhead", DISTILL_SECTOR, 1, **SMALL_FEDHEAD),
}
LATE = ("node-", "did not reply within", "logs")
BACK = ("ended without a word", "memory")
FAULTS = {
    "the ServerApp cannot be imported": RunFault(
        server_import_fails, ("package_that_is_missing", "install"), code=1, journal=False
    ),
    "the ClientApp cannot be imported": RunFault(
        node_import_fails,
        ("node-0", "package_that_is_missing", "install"),
        ("query.describe", "package_that_is_missing", "install"),
        code=1,
    ),
    "the ServerApp is killed, as if out of memory": RunFault(
        serverapp_killed, ("killed", "resume"), code=1, state="killed", within=65.0, journal=False
    ),
    "the ServerApp gets no more memory": RunFault(
        serverapp_memory, ("MemoryError", "memory is used up"), code=1
    ),
    "the ServerApp hangs, in the queue": RunFault(
        serverapp_hangs, ("25 s", "--timeout"), code=1, state="stopped", within=55.0, journal=False
    ),
    "a node's app is killed, as if out of memory": RunFault(
        worker_takes("EXECUTOR_CHILD_DIES"),
        ("node-", "SIGKILL", "train.batch-size"),
        ("train", "SIGKILL", "train.batch-size"),
    ),
    "a node's app gets no more memory": RunFault(
        worker_takes("OUT_OF_MEMORY"),
        ("node-", "MemoryError", "train.batch-size"),
        ("train", "MemoryError", "train.batch-size"),
    ),
    **{
        f"a node is killed while {phase}": RunFault(cause, LATE, BACK, code=None)
        for phase, cause in PHASES.items()
    },
    "a node's policy refuses the run": RunFault(
        policy(strategies=["hfldd"]),
        ("node-0", "policy", "take one of hfldd"),
        ("query.describe", "policy", "take one of hfldd"),
    ),
    "a node refuses the app bundle": RunFault(
        policy(bundles=["0" * 64]),
        ("node-0", "bundles", "add it"),
        ("query.describe", "bundles", "add it"),
    ),
    "a node's data disappear": RunFault(
        data_gone, ("node-", "digits.npz"), ("train", "digits.npz")
    ),
    "two nodes have one name": RunFault(same_name, ("ward-3 (2)", "--name")),
    "a node has another version": RunFault(another_version, ("node-0", "0.0.1", "install")),
    "nobody answers in a phase": RunFault(nobody_answers, ("node-2", *LATE), code=1),
    "the runs folder is full": RunFault(
        results_disk_full, ("No space left", "make room", "resume"), code=1, report=False
    ),
    "a reply breaks off": RunFault(half_a_message, (), ("SuperLink", "doctor")),
    "the network is cut for 5 s": RunFault(network_cut(5), ()),
    "the network is cut for 60 s": RunFault(network_cut(60), LATE, ("SuperLink", "doctor")),
    "the network is cut for 600 s": RunFault(network_cut(600), LATE, ("SuperLink", "doctor")),
    "the SuperLink is killed and started again": RunFault(
        superlink_killed, ("SuperLink does not answer", "start it again"), ("SuperLink", "doctor")
    ),
    "the SuperLink is killed": RunFault(
        superlink_gone,
        ("SuperLink does not answer", "start it again"),
        ("SuperLink", "doctor"),
        code=1,
        state="running",
    ),
}
