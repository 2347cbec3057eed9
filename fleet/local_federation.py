"""A federation on this machine: a SuperLink and N nodes as real processes."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import yaml

from flwr_distill.base.json_lines import VARIABLE
from flwr_distill.fleet.federation_record import FederationFile, FederationRecord
from flwr_distill.fleet.run_config import read_run_config
from flwr_distill.fleet.serverapp import preloaded
from flwr_distill.fleet.servers import (
    Addresses,
    environment,
    serverapps_command,
    superlink_command,
    why_not_free,
    write_connection,
)
from flwr_distill.fleet.submission import RunOutcome, submit
from flwr_distill.flower.control import Control, SuperLinkError, open_control
from flwr_distill.flower.lines import why_unserved
from flwr_distill.node.main import unfit_file
from flwr_distill.node.nursery import NODE, NODES, NURSERY, SERVER_APPS, WORKERS, can_fork
from flwr_distill.node.processes import Process, kill_group, start_bound, start_nursery, stop
from flwr_distill.node.secret import appio_secret
from flwr_distill.node.settings import NodeConfigValue, NodeSettings
from flwr_distill.node.supervisor import status_file
from flwr_distill.task.errors import ReportedError

CONNECTION = "flwr-distill-local"
"""Name of the connection to the SuperLink in the federation's own Flower configuration."""
OnWait = Callable[[Sequence["LocalNode"]], None]
"""Called repeatedly with the nodes that are still awaited."""


class FederationError(ReportedError, RuntimeError):
    """A federation on this machine cannot start or continue."""


def _started(process: Process | None, where: str) -> Process:
    if process is None:
        raise FederationError("was not started", where=where, remedy="call start() first")
    return process


class LocalNode:
    """One node of a local federation; its `index` is also its partition."""

    def __init__(self, index: int, state_dir: Path, start: Callable[[], Process]):
        self.index = index
        self.state_dir = state_dir
        self.log = state_dir / "node.log"
        self._start = start
        self._process: Process | None = None

    def start(self) -> None:
        """Start the node's main process."""
        self._process = self._start()

    @property
    def started(self) -> bool:
        """Whether the node was ever started."""
        return self._process is not None

    @property
    def process(self) -> Process:
        """The node's main process."""
        return _started(self._process, self.name)

    @property
    def pid(self) -> int:
        """Process id of the node's main process."""
        return self.process.pid

    @property
    def alive(self) -> bool:
        """Whether the node's main process is running."""
        return self.process.poll() is None

    @property
    def name(self) -> str:
        """Name of the node, such as ``node-3``."""
        return f"node-{self.index}"

    @property
    def online(self) -> bool:
        """Whether the node runs, and the SuperLink has admitted it."""
        return self.alive and "online" in self.status

    @property
    def warm(self) -> bool:
        """Whether the node's worker is ready for messages."""
        return "ready" in self.status

    @property
    def why_unfit(self) -> str:
        """Why the node has ended, if it cannot work here; else ''."""
        if self.alive:
            return ""
        try:
            return unfit_file(self.state_dir).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    @property
    def status(self) -> dict[str, Any]:
        """The node's status file; empty if it is of one that was killed before."""
        try:
            status = dict(json.loads(status_file(self.state_dir).read_text("utf-8")))
        except FileNotFoundError:
            return {}
        return status if status.get("pid") == self.pid else {}

    def kill(self) -> None:
        """Kill the node's main process with SIGKILL; its children end with it."""
        kill_group(self.process)

    def restart(self) -> None:
        """Stop the node if it is running, and start it with the same settings."""
        stop([self.process])
        self.start()


class LocalFederation:
    """A SuperLink and nodes on loopback, without TLS, for experiments and tests.

    Its Flower configuration is in its state directory, not the user's. All processes end with
    `stop`, or when this process dies. In its environment `env`, ``flwr run APP CONNECTION`` reaches
    it by `connection`; `superlink_log` has the output of the SuperLink and the ServerApps.

    Parameters
    ----------
    num_nodes : int
        Number of nodes. Node i has ``partition-id=i`` and ``num-partitions=num_nodes``.
    state_dir : Path
        Directory for logs, Flower's configuration and the nodes' own directories.
    node_config : Mapping[str, str | int | float | bool] | None (default: None)
        More keys of the node config, the same for every node.
    node_settings : Mapping[str, Any] | None (default: None)
        More settings of the nodes, as in a file for ``flwr-distill node --config``. Nodes use one
        thread unless it has ``threads``. Servers have their ``log-format``, too.
    data : Sequence[Path] (default: ())
        A folder or file of data for each node; if empty, nodes have partitions of a data set.
    port : int | None (default: None)
        Port of the Fleet API; the Control API and the ServerAppIo API get the next two. None: any.
    direct_links : bool (default: False)
        Give every node an address on loopback, for direct links.
    database : Path | None (default: None)
        File for the SuperLink's state and the messages that pass through it. None: in memory.
    cwd : Path | None (default: None)
        Working directory of the SuperLink and its ServerApps. None: that of this process.
    """

    connection = CONNECTION

    def __init__(
        self,
        num_nodes: int,
        state_dir: Path,
        *,
        node_config: Mapping[str, NodeConfigValue] | None = None,
        node_settings: Mapping[str, Any] | None = None,
        data: Sequence[Path] = (),
        port: int | None = None,
        direct_links: bool = False,
        database: Path | None = None,
        cwd: Path | None = None,
    ) -> None:
        if num_nodes < 1:
            raise ValueError(f"num_nodes must be at least 1, got {num_nodes}")
        if data and len(data) != num_nodes:
            raise ValueError(f"data must have a path for each of {num_nodes} nodes: {len(data)}")
        self.state_dir = state_dir.resolve()
        self.superlink_log = self.state_dir / "superlink.log"
        self.env = environment(self.state_dir / "flower")
        self.fleet_address = self.control_address = ""
        self._cwd = cwd
        self._database = database
        self._port = port
        self._data = data
        self._file = FederationFile(self.state_dir)
        # Replies of these nodes stay on this machine.
        self._node_settings = {"node-config": dict(node_config or {}), "policy": "open"}
        self._node_settings |= node_settings or {}
        self.env[VARIABLE] = str(self._node_settings.get("log-format", "text"))
        self._superlink: Process | None = None
        self._serverapps: Process | None = None
        self._serverapps_command: list[str] = []
        self._nurseries = ExitStack()
        self.nursery_pids: list[int] = []
        """Pids of the processes from which those of nodes, and ServerApps, are forked."""
        addresses: list[str | None] = [None] * num_nodes
        if direct_links:
            addresses = [f"127.0.0.1:{port}" for port in free_ports(num_nodes)]
        self.nodes = [self._make_node(index, addresses) for index in range(num_nodes)]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self, *, timeout: float = 120.0, on_wait: OnWait | None = None) -> None:
        """Start all processes unless they are started, and wait until every node is online.

        Raises `FederationRunsError` if another federation runs in the same state directory, and
        `FederationError` with another line of Flower, or if the SuperLink ends early or the nodes
        are not online within `timeout` seconds; all processes are then stopped.
        """
        if self._superlink is not None:
            return
        if reason := why_unserved():
            raise FederationError(reason)
        deadline = time.monotonic() + timeout
        self._file.lock()
        try:
            self._start_nurseries()
            self._start_superlink()
            for node in self.nodes:
                node.start()
            self._wait_for_superlink(timeout)
            self.wait_for_nodes(timeout=max(1.0, deadline - time.monotonic()), on_wait=on_wait)
            if str(self._node_settings.get("device")).startswith("cuda"):
                self._wait_for_gpus(deadline, on_wait)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End all processes: nodes first, so that they sign off, then the SuperLink."""
        stop([node.process for node in self.nodes if node.started])
        stop([each for each in (self._superlink, self._serverapps) if each is not None])
        self._superlink = self._serverapps = None
        self._nurseries.close()
        self.nursery_pids.clear()
        self._file.unlock()

    @property
    def is_open(self) -> bool:
        """Whether its nodes have the policy ``open``: runs may read their samples."""
        return bool(self._node_settings["policy"] == "open")

    @property
    def superlink_pid(self) -> int:
        """Process id of the SuperLink."""
        return _started(self._superlink, "the federation").pid

    @property
    def serverapps_pid(self) -> int:
        """Process id of the parent of ServerApps."""
        return _started(self._serverapps, "the federation").pid

    def restart_dead_nodes(self) -> list[LocalNode]:
        """Restart the ServerApps' parent and nodes whose main process has ended; return the nodes.

        Raises `FederationError` if the SuperLink has ended, and with it all runs, or a node because
        it cannot work on this machine.
        """
        self._check_fit()
        if self._serverapps is not None and self._serverapps.poll() is not None:
            self._serverapps = self._start_server(self._serverapps_command)
        dead = [node for node in self.nodes if not node.alive]
        for node in dead:
            node.start()
        return dead

    def wait_for_nodes(self, *, timeout: float = 120.0, on_wait: OnWait | None = None) -> None:
        """Wait until all nodes are online, for at most `timeout` seconds."""
        count = len(self.nodes)
        deadline = time.monotonic() + timeout
        while awaited := [node for node in self.nodes if not node.online]:
            self._check_fit()
            if on_wait is not None:
                on_wait(awaited)
            if time.monotonic() > deadline or not any(node.alive for node in self.nodes):
                online = count - len(awaited)
                raise self._error(f"{online} of {count} nodes came online within {timeout:.0f} s")
            time.sleep(0.2)

    def run(
        self,
        app_dir: Path,
        run_config: str | Mapping[str, Any] = "",
        *,
        on_line: Callable[[str], None] | None = None,
        timeout: float = 600.0,
    ) -> RunOutcome:
        """Submit an app, follow its log and return how it ended.

        Overrides of its run config are by dotted key, or text for `read_run_config`. `on_line` is
        called with every line of the log. A run that takes over `timeout` seconds is stopped.
        Raises as `submit`, and `SuperLinkError` if the SuperLink does not answer for a minute.
        """
        if isinstance(run_config, str):
            run_config = read_run_config(run_config)
        control = self._patient_control
        return submit(app_dir, run_config, control=control, on_line=on_line, timeout=timeout)

    def node_command(self, settings: Path) -> list[str]:
        """Return the command that starts a node with this YAML file of settings."""
        return [sys.executable, "-P", "-m", NODE, str(settings)]

    def _wait_for_gpus(self, deadline: float, on_wait: OnWait | None) -> None:
        """Wait until every node has used its GPU: one that cannot would leave runs waiting."""
        while cold := [node for node in self.nodes if not node.warm]:
            self._check_fit()
            if on_wait is not None:
                on_wait(cold)
            if time.monotonic() > deadline:
                raise self._error("not all nodes could use a GPU in time")
            time.sleep(0.2)

    def _error(self, problem: str) -> FederationError:
        return FederationError(problem, remedy=f"see the logs {self.state_dir}/node-*/node.log")

    def _check_fit(self) -> None:
        if self._superlink is not None and self._superlink.poll() is not None:
            raise FederationError(
                "the SuperLink has ended: was it killed, or out of memory?",
                remedy=f"see {self.superlink_log}, start the federation again, and continue runs "
                'with resume = "latest"',
            )
        for node in self.nodes:
            if reason := node.why_unfit:
                raise FederationError(f"cannot work: {reason}", where=node.name)

    def _make_node(self, index: int, peer_addresses: list[str | None]) -> LocalNode:
        state_dir = self.state_dir / f"node-{index}"

        def start() -> Process:
            state_dir.mkdir(parents=True, exist_ok=True)
            settings = {
                "superlink": self.fleet_address,
                "insecure": True,
                "partition-id": index,
                "num-partitions": len(peer_addresses),
                "state-dir": str(state_dir),
                "threads": 1,
                "peer-address": peer_addresses[index],
                **({"data": str(self._data[index].resolve())} if self._data else {}),
                **self._node_settings,
            }
            file = state_dir / "node.yaml"
            file.write_text(yaml.safe_dump(settings), encoding="utf-8")
            return start_bound(self.node_command(file), log=state_dir / "node.log", env=self.env)

        return LocalNode(index, state_dir, start)

    def _control(self) -> Control:
        return open_control(self.control_address)

    def _patient_control(self) -> Control:
        link = self._control()
        link.wait(60.0)
        return link

    def _wait_for_superlink(self, timeout: float) -> None:
        superlink = _started(self._superlink, "the federation")
        try:
            with self._control() as link:
                link.wait(timeout, is_up=lambda: superlink.poll() is None)
        except SuperLinkError as error:
            remedy = f"see {self.superlink_log}"
            raise FederationError("the SuperLink did not start", remedy=remedy) from error

    def _start_superlink(self) -> None:
        port, *others = self._three_ports()
        addresses = Addresses.beside(f"127.0.0.1:{port}", *others)
        self.fleet_address, self.control_address = addresses.fleet, addresses.control
        write_connection(Path(self.env["FLWR_HOME"]), CONNECTION, addresses.control)
        self._file.write(
            FederationRecord(
                pid=os.getpid(),
                control_address=addresses.control,
                flower_home=self.env["FLWR_HOME"],
                node_dirs=[str(node.state_dir) for node in self.nodes],
                working_dir=str((self._cwd or Path()).resolve()),
            )
        )
        secret = appio_secret(self.state_dir)
        command = superlink_command(addresses, secret, None, self._database)
        self._superlink = self._start_server(command)
        self._serverapps_command = serverapps_command(addresses, secret, self._superlink.pid)
        self._serverapps = self._start_server(self._serverapps_command)

    def _start_server(self, command: Sequence[str]) -> Process:
        """Start the SuperLink, or its ServerApps' parent."""
        if shutil.which(command[0], path=self.env["PATH"]) is None:
            raise FederationError(
                f"the command {command[0]} is missing",
                remedy="it comes with flwr: install that again in the environment of flwr-distill",
            )
        return start_bound(command, log=self.superlink_log, env=self.env, cwd=self._cwd)

    def _start_nurseries(self) -> None:
        """Start the processes from which nodes' processes are forked, where that is possible."""
        if not can_fork():
            return
        folder = self._nurseries.enter_context(TemporaryDirectory())
        self.env[NURSERY] = folder
        self._nurseries.callback(self.env.pop, NURSERY)
        of_nodes = {
            **self.env,
            "OMP_NUM_THREADS": str(self._node_settings.get("threads", 1)),
            "FLWR_LOG_LEVEL": str(self._node_settings.get("log-level", "INFO")),
        }
        preload = self._node_settings.get("preload", NodeSettings.model_fields["preload"].default)
        for name, modules, env, cwd in (
            (NODES, (), of_nodes, None),
            (WORKERS, preload, of_nodes, None),
            (SERVER_APPS, preloaded(), self.env, self._cwd),
        ):
            log = self.state_dir / "nursery.log"
            nursery = start_nursery(Path(folder), name, modules, log=log, env=env, cwd=cwd)
            self.nursery_pids.append(nursery.pid)
            self._nurseries.callback(stop, [nursery])

    def _three_ports(self) -> list[int]:
        ports = free_ports(3) if self._port is None else [self._port + n for n in range(3)]
        for port in ports:
            if reason := why_not_free(f"127.0.0.1:{port}"):
                remedy = "give another, with two free ones after it"
                raise FederationError(reason, where="port", value=self._port, remedy=remedy)
        return ports


def free_ports(count: int) -> list[int]:
    """Find different ports on loopback that are free now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
