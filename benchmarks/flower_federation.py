"""A federation of the installed Flower's own processes, whichever it is; some nodes may be ours."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from flwr_distill.fleet.local_federation import LocalNode, free_ports
from flwr_distill.fleet.servers import Addresses, listening_arguments
from flwr_distill.fleet.submission import RunOutcome
from flwr_distill.node.processes import Process, stop
from flwr_distill.node.stock import appio_arguments

OUR_PACKAGES = {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
BIN = Path(sys.executable).parent
STARTS_WITHIN = 180.0
_GRACE = 15.0


class FlowerFederation:
    """`flower-superlink`, and `flower-supernode` but for the first nodes, which are ours.

    Parameters
    ----------
    num_nodes : int
        Number of nodes.
    folder : Path
        Directory for the log, Flower's configuration and the nodes' own directories.
    ours : int
        How many of them are started as `flwr-distill node` does. If it is all of them, ServerApps
        find our packages, too; else apps have them from their bundle alone.
    node_settings : Mapping[str, Any] | None (default: None)
        More settings of these.
    """

    def __init__(
        self,
        num_nodes: int,
        folder: Path,
        *,
        ours: int,
        node_settings: Mapping[str, Any] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.log = folder, folder / "flower.log"
        port, *others = free_ports(3)
        self._addresses = Addresses.beside(f"127.0.0.1:{port}", *others)
        self.control = self._addresses.control
        self._settings = dict(node_settings or {})
        self._ours = ours
        home = folder / "home"
        home.mkdir()
        self._env = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "PATH": os.pathsep.join([str(BIN), os.environ["PATH"]]),
        }
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "stock"\n[superlink.stock]\naddress = "{self.control}"\n'
            "insecure = true\n"
        )
        self._superlink: Process | None = None
        self.nodes = [self._make_node(place, num_nodes) for place in range(num_nodes)]

    def __enter__(self) -> FlowerFederation:
        try:
            found = OUR_PACKAGES if self._ours == len(self.nodes) else {}
            self._superlink = self._start(self._superlink_command(), found)
            for node in self.nodes:
                node.start()
            self._wait_for(self.control)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def superlink_pid(self) -> int:
        """Process id of the SuperLink, which starts ServerApps."""
        assert self._superlink is not None
        return self._superlink.pid

    serverapps_pid = superlink_pid

    def stop(self) -> None:
        """Stop all processes, and kill what has not ended after a while."""
        processes = [node.process for node in self.nodes if node.started]
        processes += [self._superlink] if self._superlink is not None else []
        stop(processes, grace=_GRACE)

    def run(self, app: Path, config: Mapping[str, Any], *, timeout: float = 900.0) -> RunOutcome:
        """Run an app with `flwr run`, for so many seconds at the most; its id is not known."""
        values = {name: str(v).lower() if isinstance(v, bool) else v for name, v in config.items()}
        text = " ".join(
            f"{n}='{v}'" if isinstance(config[n], str) else f"{n}={v}" for n, v in values.items()
        )
        done = subprocess.run(
            [BIN / "flwr", "run", str(app), "stock", "--stream", "-c", text],
            env=self._env,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        status = "finished:completed" if done.returncode == 0 else "finished:failed"
        return RunOutcome(0, status, (done.stdout + done.stderr).splitlines())

    def _superlink_command(self) -> list[str]:
        return [
            *("flower-superlink", "--insecure", "--disable-runtime-dependency-installation"),
            *listening_arguments(self._addresses),
        ]

    def _make_node(self, place: int, num_nodes: int) -> LocalNode:
        folder = self.folder / f"node-{place}"
        folder.mkdir()
        make = self._our_command if place < self._ours else self._stock_command
        command = make(place, num_nodes, folder)
        env = OUR_PACKAGES if place < self._ours else {}
        return LocalNode(place, folder, lambda: self._start(command, env))

    def _stock_command(self, place: int, num_nodes: int, folder: Path) -> list[str]:
        (port,) = free_ports(1)
        device = self._settings.get("device", "cpu")
        return [
            *("flower-supernode", "--insecure", "--superlink", self._addresses.fleet),
            *appio_arguments(port),
            "--node-config",
            f"partition-id={place} num-partitions={num_nodes} device='{device}' "
            f"state-dir='{folder}'",
        ]

    def _our_command(self, place: int, num_nodes: int, folder: Path) -> list[str]:
        file = self.folder / f"node-{place}.yaml"
        settings = {
            **{"superlink": self._addresses.fleet, "insecure": True, "policy": "open"},
            **{"partition-id": place, "num-partitions": num_nodes, "state-dir": str(folder)},
            **{"device": "cpu", "threads": 1, **self._settings},
        }
        file.write_text(yaml.safe_dump(settings))
        return ["python", "-P", "-m", "flwr_distill.node.main", str(file)]

    def _start(self, command: Sequence[str], env: Mapping[str, str]) -> Process:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [BIN / command[0], *command[1:]],
                stdout=log,
                stderr=log,
                env={**self._env, **env},
                cwd=self.folder,
                start_new_session=True,
            )

    def _wait_for(self, address: str) -> None:
        host, _, port = address.partition(":")
        end = time.monotonic() + STARTS_WITHIN
        while True:
            with contextlib.suppress(OSError):
                return socket.create_connection((host, int(port)), timeout=1).close()
            if time.monotonic() > end or self._superlink is None or self._superlink.poll():
                raise RuntimeError(f"no SuperLink answers: {self.log.read_text()[-4000:]}")
            time.sleep(0.5)
