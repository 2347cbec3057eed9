"""Runs that causes break: on one federation, whose nodes reach the SuperLink over own links."""

import contextlib
import os
import subprocess
import sys
import time

import yaml

from flwr_distill.flower.control import open_control
from flwr_distill.node.processes import start_bound, stop
from tests.faults.conftest import Federation, app_with_faults
from tests.proxies import Wire
from tests.waiting import wait_until

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
            for run in control.runs():
                if not run.status.finished:
                    control.stop_run(run.run_id)

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
            wait_until(lambda: list(queued.glob("*.sock*")))
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
        return wait_until(
            lambda: list(self.federation.faults.glob(name)),
            seconds,
            lambda: f"{name} does not come\n{self.log.read_text()}",
        )[0]

    def after_round(self, number):
        """Let the run continue to the end of a round; return the ServerApp's pid."""
        for earlier in range(number):
            (self.federation.faults / f"go.{earlier}").touch()
        return int(self.found(f"over.{number}").read_text())

    def release(self):
        """Let all rounds continue."""
        for number in range(100):
            (self.federation.faults / f"go.{number}").touch()

    def heal(self):
        """End a fault that ends before the run does; a cause may set this."""

    def broke(self):
        """Now the fault is there."""
        self.broken_at = time.monotonic()

    def end(self):
        """End what a failed test has left."""
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.federation.stop_runs()


def _toml(value):
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
