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
from pathlib import Path

import numpy as np
import yaml
from sklearn.datasets import load_digits

from flwr_distill.node.processes import kill_group
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
        super().__init__(folder, num_nodes=NODES)

    def node_command(self, settings):
        index = int(settings.parent.name.removeprefix("node-"))
        if index not in self.wires:
            self.wires[index] = Wire(self.fleet_address)
        values = yaml.safe_load(settings.read_text()) | self.own_settings.get(index, {})
        values["superlink"] = self.wires[index].address
        settings.write_text(yaml.safe_dump(values))
        return super().node_command(settings)

    def stop(self):
        super().stop()
        for wire in self.wires.values():
            wire.close()

    def set_node(self, index, **settings):
        """Restart a node with these settings of its own; without any, as it was."""
        self.own_settings[index] = {key.replace("_", "-"): v for key, v in settings.items()}
        self.nodes[index].restart()
        self.make_whole()

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
        self.victim = None
        self.broken_at = 0.0
        self._marks = {}

    def app(self, **modules):
        """An app folder with these modules of the folder ``app`` as its two sides."""
        key = tuple(sorted(modules.items()))
        if key not in self.apps:
            folder = self.folder / f"app-{len(self.apps)}"
            folder.mkdir()
            self.apps[key] = app_with_faults(folder, **modules)
        return self.apps[key]

    def start(self, *, app=None, **settings):
        """Submit a run by `flwr-distill run`; keys have _ for - and __ for a dot."""
        for file in self.federation.faults.iterdir():
            file.unlink()
        named = {k.replace("__", ".").replace("_", "-"): v for k, v in settings.items()}
        config = SETTINGS | {"runs-dir": str(self.runs_dir)} | named
        text = " ".join(f"{key}={_toml(value)}" for key, value in config.items())
        command = [sys.executable, "-c", COMMAND, str(app or self.app()), "run"]
        command += ["--insecure", "--superlink", self.federation.control_address, "-c", text]
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
        self.victim = self.federation.numbers[int(file.suffix[1:])]
        self.broke()

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

    def end(self, seconds=120):
        return self.process.wait(seconds)


def _toml(value):
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def server_import_fails(play):
    play.start(app=play.app(server="faulty.needs_a_package"))
    play.broke()
    yield


def node_import_fails(play):
    play.start(app=play.app(server="flwr_distill.server.app", client="faulty.needs_a_package"))
    play.broke()
    yield


def serverapp_killed(play):
    play.start()
    pid = play.after_round(1)
    os.kill(pid, signal.SIGKILL)
    play.broke()
    yield


def node_killed(play, strategy="hfldd", phase="train.distill", number=0, **settings):
    play.start(strategy=strategy, min_nodes=2, **settings)
    play.arm("NODE_DIES_DURING_WORK", phase, number)
    play.release()
    play.taken(phase, number)
    yield
    play.federation.make_whole()


def worker_killed(play):
    play.start()
    play.arm("EXECUTOR_CHILD_DIES", "train", 2)
    play.release()
    play.taken("train", 2)
    yield


def policy_refuses(play):
    play.federation.set_node(0, policy={"strategies": ["hfldd"]})
    play.start(min_nodes=2)
    play.victim = 0
    play.release()
    play.broke()
    yield
    play.federation.set_node(0)


def bundle_refused(play):
    play.federation.set_node(0, policy={"bundles": ["0" * 64]})
    play.start(min_nodes=2)
    play.victim = 0
    play.release()
    play.broke()
    yield
    play.federation.set_node(0)


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
        play.federation.set_node(index, name=f"ward-{index}", **own)
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
    play.start()
    play.after_round(1)
    kill_group(play.federation._superlink)
    play.release()
    play.broke()
    time.sleep(5)
    play.federation._start_superlink()
    yield


def superlink_gone(play):
    play.start()
    play.after_round(1)
    kill_group(play.federation._superlink)
    play.release()
    play.broke()
    yield
    play.federation._start_superlink()


def half_a_message(play):
    play.start(model="convnet3")
    play.after_round(1)
    play.federation.wires[0].break_after(300_000)
    play.victim = 0
    play.release()
    play.broke()
    yield


def network_cut(play, seconds=5):
    play.start(min_nodes=2)
    play.after_round(1)
    play.federation.wires[0].cut()
    play.victim = 0
    play.release()
    play.broke()
    threading.Timer(seconds, play.federation.wires[0].heal).start()
    yield
    play.federation.wires[0].heal()


def network_cut_60(play):
    yield from network_cut(play, 60)


def worker_memory(play):
    play.start()
    play.arm("OUT_OF_MEMORY", "train", 2)
    play.release()
    play.taken("train", 2)
    yield


def serverapp_memory(play):
    play.start(app=play.app(server="faulty.server_out_of_memory"))
    play.broke()
    yield


def serverapp_hangs(play):
    play.start(app=play.app(server="faulty.server_hangs"))
    play.broke()
    yield
