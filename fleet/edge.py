"""An edge: takes part in a federation as one node, which is a federation of its own below."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from flwr_distill.base.json_lines import VARIABLE
from flwr_distill.fleet.edge_runs import EdgeRuns
from flwr_distill.fleet.federation_record import FederationFile
from flwr_distill.fleet.local_federation import LocalNode
from flwr_distill.fleet.serverapp import preloaded
from flwr_distill.fleet.servers import (
    Addresses,
    ServerCertificate,
    by_name,
    environment,
    serverapps_command,
    superlink_command,
    why_not_free,
)
from flwr_distill.flower.bundle import app_bundle
from flwr_distill.flower.control import Control, open_control
from flwr_distill.node.nursery import NODE, NURSERY, SERVER_APPS, can_fork
from flwr_distill.node.processes import Process, start_bound, start_nursery, stop
from flwr_distill.node.secret import appio_secret
from flwr_distill.task.errors import ReportedError
from flwr_distill.task.settings import RunConfigValue

CHECK_EVERY = 1.0
START_TIMEOUT = 300.0
"""Seconds for the SuperLink below; a busy machine is slow."""
SETTLED_AFTER = 30.0
MAX_PAUSE = 10.0


class EdgeStartError(ReportedError):
    """An edge cannot start, or cannot continue."""


@dataclass(frozen=True)
class Below:
    """The edge's side for its own nodes, with its own settings of runs.

    `address` is ``host:port`` of the Fleet API; the Control API and the ServerAppIo API have the
    next two ports on loopback. Without a certificate there is no TLS, and any node is admitted.
    """

    address: str
    certificate: ServerCertificate | None
    run_config: Mapping[str, RunConfigValue]

    @property
    def addresses(self) -> Addresses:
        """Addresses of its SuperLink."""
        port = int(self.address.rpartition(":")[2])
        return Addresses.beside(self.address, port + 1, port + 2)


class Edge:
    """A SuperLink for nodes below, a node above, and the runs between them.

    `node` has the settings of the node above, as in a file for ``flwr-distill node --config``;
    `state_dir` is the node's, with the SuperLink's files in its folder ``below``.
    """

    def __init__(
        self, node: Mapping[str, Any], state_dir: Path, below: Below, app_dir: Path
    ) -> None:
        self._below = below
        self._app_dir = app_dir
        self._state_dir = state_dir
        self._state = state_dir / "below"
        self._env = environment(self._state / "flower")
        self._env[VARIABLE] = str(node.get("log-format", "text"))
        self._servers_env = dict(self._env)
        self._node_settings = node
        self._servers: list[Process] = []
        self._started = 0.0
        self._pause = CHECK_EVERY

    def run(self) -> None:
        """Run until SIGINT or SIGTERM raises `KeyboardInterrupt`; then end the runs below.

        Call it from the main thread: its processes end with the thread that starts them. Raises
        `EdgeStartError` if it cannot work, and `FederationRunsError` if another edge runs in the
        same state directory.
        """
        file = FederationFile(self._state)
        file.lock()
        with (  # the app above has access to the first folder
            TemporaryDirectory(prefix="edge-") as sockets,
            TemporaryDirectory(prefix="edge-") as nursery,
        ):
            node = self._node(Path(sockets))
            own = self._below.run_config
            bundle = app_bundle(self._app_dir, own)
            runs = EdgeRuns(Path(sockets), self._state, own, self._control, bundle)
            server = runs.listen()
            nurseries = self._start_nursery(Path(nursery))
            try:
                self._start_servers()
                with self._control():
                    pass
                node.start()
                while True:
                    time.sleep(CHECK_EVERY)
                    self._restart_dead(node)
            finally:
                stop([node.process] if node.started else [])
                runs.end()
                server.stop(grace=None)
                stop([*self._servers, *nurseries])
                file.unlock()

    def _node(self, sockets: Path) -> LocalNode:
        """The node above, which gets the sockets."""
        file = self._state_dir / "node.yaml"

        def start() -> Process:
            settings = {**self._node_settings, "edge": str(sockets), "device": "cpu"}
            file.write_text(yaml.safe_dump(settings), encoding="utf-8")
            command = [sys.executable, "-P", "-m", NODE, str(file)]
            return start_bound(command, log=self._state_dir / "node.log", env=self._env)

        return LocalNode(0, self._state_dir, start)

    def _start_nursery(self, folder: Path) -> list[Process]:
        """Start the process from which ServerApps are forked, where that is possible."""
        if not can_fork():
            return []
        self._servers_env[NURSERY] = str(folder)
        log = self._state / "nursery.log"
        return [start_nursery(folder, SERVER_APPS, preloaded(), log=log, env=self._env)]

    def _start_servers(self) -> None:
        """Start the SuperLink, and its ServerApps' parent."""
        addresses, secret = self._below.addresses, appio_secret(self._state)
        for address in (addresses.fleet, addresses.control, addresses.serverappio):
            if reason := why_not_free(address):
                raise EdgeStartError(
                    reason,
                    where="below-address",
                    value=self._below.address,
                    remedy="give another, with two free ports after it",
                )
        certificate = self._below.certificate
        command = superlink_command(addresses, secret, certificate, self._state / "superlink.db")
        self._started = time.monotonic()
        superlink = self._start(command)
        self._servers = [superlink]
        apps = serverapps_command(addresses, secret, superlink.pid, certificate)
        self._servers.append(self._start(apps))

    def _start(self, command: list[str]) -> Process:
        log = self._state / "superlink.log"
        return start_bound(command, log=log, env=self._servers_env)

    def _restart_dead(self, node: LocalNode) -> None:
        """Restart processes that have died, after a pause that grows with each death."""
        if reason := node.why_unfit:
            raise EdgeStartError(f"the node above cannot work: {reason}")
        dead = [server for server in self._servers if server.poll() is not None]
        if not dead and node.alive:
            return
        if time.monotonic() - self._started > SETTLED_AFTER:
            self._pause = CHECK_EVERY
        message = f"flwr-distill edge: process died; restarting in {self._pause:.0f} s"
        print(message, file=sys.stderr)
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, MAX_PAUSE)
        if dead:
            stop(self._servers)
            self._start_servers()
        if not node.alive:
            node.start()

    def _control(self) -> Control:
        """Open the Control API once the SuperLink answers."""
        address, authority = self._below.addresses.control, None
        if self._below.certificate:
            address = by_name(address)
            authority = self._below.certificate.authority
        link = open_control(address, authority)
        link.wait(START_TIMEOUT, is_up=lambda: self._servers[0].poll() is None)
        return link
