"""A federation of the installed Flower's own processes: nothing of ours is installed there."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from fleet.local_federation import free_ports
from task.words import counted

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
FLOWER = tuple(map(int, version("flwr").split(".")[:2]))
SECONDS = 900
"""A run may take so long."""
STARTS_WITHIN = 180
GRACE = 15


class StockFederation:
    """`flower-superlink`, and `flower-supernode` but for the first node, which is ours.

    Flower moved its APIs to HTTP one after the other: what apps ask of it with 1.35, its CLI with
    1.37, SuperNodes with 1.40.
    """

    def __init__(self, nodes, folder):
        self.folder, self.log = folder, folder / "flower.log"
        http, control, fleet, *own = (f"127.0.0.1:{port}" for port in free_ports(3 + nodes))
        control = control if FLOWER < (1, 37) else http
        fleet = fleet if FLOWER < (1, 40) else http
        self._env = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "PATH": os.pathsep.join([str(BIN), os.environ["PATH"]]),
        }
        (folder / "home").mkdir()
        (folder / "home" / "config.toml").write_text(
            f'[superlink]\ndefault = "stock"\n[superlink.stock]\naddress = "{control}"\n'
            "insecure = true\n"
        )
        self.processes = []
        superlink = ["flower-superlink", "--insecure", "--disable-runtime-dependency-installation"]
        if FLOWER < (1, 35):
            superlink += ["--serverappio-api-address", http]
        else:
            superlink += ["--host", "127.0.0.1", "--port", http.partition(":")[2]]
        if FLOWER < (1, 37):
            superlink += ["--control-api-address", control]
        if FLOWER < (1, 40):
            superlink += ["--fleet-api-address", fleet]
        self._start(superlink)
        for place, address in enumerate(own[1:], start=1):
            at = ["--port", address.partition(":")[2]]
            config = f"partition-id={place} num-partitions={nodes} device='cpu' state-dir="
            self._start(
                [
                    *("flower-supernode", "--insecure", "--superlink", fleet),
                    *(["--clientappio-api-address", address] if FLOWER < (1, 35) else at),
                    *("--node-config", f"{config}'{folder / f'node-{place}'}'"),
                ]
            )

        self._start_ours(fleet, nodes)
        self._wait_for(control)

    def _start_ours(self, fleet, nodes):
        """Start the first node as `flwr-distill node` does."""
        file = self.folder / "node.yaml"
        settings = {"superlink": fleet, "insecure": True, "policy": "open", "device": "cpu"}
        place = {"partition-id": 0, "num-partitions": nodes, "threads": 1}
        file.write_text(
            yaml.safe_dump({**settings, **place, "state-dir": str(self.folder / "node-0")})
        )
        self._env["PYTHONPATH"] = str(ROOT)
        self._start(["python", "-P", "-m", "node.main", str(file)])
        del self._env["PYTHONPATH"]

    def _wait_for(self, address):
        host, _, port = address.partition(":")
        end = time.monotonic() + STARTS_WITHIN
        while True:
            try:
                return socket.create_connection((host, int(port)), timeout=1).close()
            except OSError:
                assert time.monotonic() < end, self.log.read_text()
                assert self.processes[0].poll() is None, self.log.read_text()
                time.sleep(0.5)

    def _start(self, command):
        with self.log.open("ab") as log:
            self.processes.append(
                subprocess.Popen(
                    [BIN / command[0], *command[1:]],
                    stdout=log,
                    stderr=log,
                    env=self._env,
                    cwd=self.folder,
                    start_new_session=True,
                )
            )

    def stop(self):
        """Stop all processes, and kill what has not ended after a while."""
        for process in self.processes:
            process.terminate()
        end = time.monotonic() + GRACE
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def run(self, app, config):
        """Run an app with `flwr run`; return what it printed."""
        values = {name: str(v).lower() if isinstance(v, bool) else v for name, v in config.items()}
        text = " ".join(
            f"{n}='{v}'" if isinstance(v, str) else f"{n}={v}" for n, v in values.items()
        )
        done = subprocess.run(
            [BIN / "flwr", "run", str(app), "stock", "--stream", "-c", text],
            env=self._env,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        return done.stdout + done.stderr


@pytest.fixture(scope="session")
def app(tmp_path_factory):
    """Our app as it is published: its packages and settings, without what is installed here."""
    folder = tmp_path_factory.mktemp("stock") / "flwr-distill"
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for room in settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, folder)
    return folder


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """Start three stock nodes."""
    federation = StockFederation(3, tmp_path_factory.mktemp("federation"))
    print(f"flwr {version('flwr')}: {counted(3, 'node')}, log {federation.log}")
    yield federation
    federation.stop()
