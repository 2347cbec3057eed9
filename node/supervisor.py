"""A node: SuperNode, executor and, where it has a peer address, mailbox, supervised as one unit.

If one of them ends, the others are ended too and all are started again: a SuperNode that lost its
executor in mid-task would wait for its answer forever, and an executor's task is void without the
SuperNode that it came from. A SuperNode that is ended with SIGTERM tells the SuperLink, so that
strategies get an error for it at once; one that was killed is refused for up to a minute under the
same key, and started again until it is accepted.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any

from node.processes import start_bound, stop
from node.reachability import check_superlink
from node.settings import NodeError, NodeSettings

MAILBOX_ENVIRONMENT = {"GRPC_VERBOSITY": "info"}
"""gRPC itself then says which TLS handshakes it refused, and why; Flower would have it silent."""

_LONGEST_PAUSE = 10.0
_SETTLED_AFTER = 30.0


class _AskedToStop(BaseException):
    """A signal asked the node to end."""


class _Part:
    """A supervised process and the reports that it sends."""

    def __init__(self, name: str, command: Callable[[int], Sequence[str]], env: dict[str, str]):
        self.name = name
        self.reports, theirs = Pipe(duplex=False)
        with theirs:
            self.process: subprocess.Popen[bytes] = start_bound(
                command(theirs.fileno()), env=env, pass_fds=[theirs.fileno()]
            )


class Node:
    """Runs a node until it is told to end.

    Parameters
    ----------
    settings : NodeSettings
        What the node is told.
    """

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._status: dict[str, Any] = {"pid": os.getpid(), "starts": 0}
        self._parts: list[_Part] = []

    def run(self) -> None:
        """Run the node; return after SIGTERM or SIGINT, with all of its processes ended.

        Raises
        ------
        NodeError
            If the node cannot work, however often it is started.
        """
        previous = {
            number: signal.signal(number, _raise_asked_to_stop)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            self._prepare()
            self._supervise()
        except _AskedToStop:
            pass
        finally:
            for number in previous:
                signal.signal(number, signal.SIG_IGN)
            self._stop_parts()
            self._write_status(ended=True)
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _prepare(self) -> None:
        settings = self._settings
        settings.state_dir.mkdir(parents=True, exist_ok=True)
        self._node_config.write_text(
            "".join(
                f"{json.dumps(key)} = {json.dumps(value, ensure_ascii=False)}\n"
                for key, value in settings.app_config.items()
            ),
            encoding="utf-8",
        )
        check_superlink(
            settings.superlink,
            insecure=settings.insecure,
            root_certificates=settings.root_certificates,
            timeout=settings.connect_timeout,
        )
        if settings.metrics_port is not None:
            from node.metrics import serve_metrics  # here: most nodes do without

            serve_metrics(self._status, settings.metrics_port)

    def _supervise(self) -> None:
        pause = 1.0
        while True:
            started = time.monotonic()
            self._start_parts()
            why = self._wait_for_an_end()
            self._stop_parts()
            if time.monotonic() - started > _SETTLED_AFTER:
                pause = 1.0
            _say(f"{why}: starting all parts again in {pause:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _start_parts(self) -> None:
        address = f"127.0.0.1:{_free_port()}"
        env = self._environment()
        self._status["starts"] += 1
        self._parts = []
        self._parts.append(
            _Part("supernode", lambda report: self._supernode_command(address, report), env)
        )
        self._parts.append(
            _Part("executor", lambda report: self._executor_command(address, report), env)
        )
        if self._settings.peer_address is not None:
            self._parts.append(
                _Part("mailbox", self._mailbox_command, {**env, **MAILBOX_ENVIRONMENT})
            )
        self._status |= {part.name: part.process.pid for part in self._parts}
        self._write_status()

    def _wait_for_an_end(self) -> str:
        """Read the parts' reports until one of them ends; say which."""
        parts = {part.reports: part for part in self._parts}
        while True:
            for reports in wait(list(parts)):
                assert isinstance(reports, Connection)
                try:
                    what, value = reports.recv()
                except EOFError:
                    return f"the {parts[reports].name} ended"
                if what == "unfit":
                    raise NodeError(value)
                if what == "worker":
                    self._status.pop("ready", None)
                self._status[what] = value
                self._write_status()

    def _stop_parts(self) -> None:
        stop([part.process for part in self._parts])
        for part in self._parts:
            part.reports.close()
        self._parts = []
        for what in ("supernode", "executor", "mailbox", "worker", "ready", "online"):
            self._status.pop(what, None)

    def _supernode_command(self, appio_address: str, report: int) -> list[str]:
        settings = self._settings
        command = [
            *(sys.executable, "-P", "-m", "node.supernode", str(report)),
            *("--superlink", settings.superlink),
            *("--isolation", "process"),
            *("--clientappio-api-address", appio_address),
            *("--node-config", str(self._node_config)),
        ]
        if settings.insecure:
            command += ["--insecure"]
        if settings.root_certificates is not None:
            command += ["--root-certificates", str(settings.root_certificates)]
        if settings.auth_key is not None:
            command += ["--auth-supernode-private-key", str(settings.auth_key)]
        return command

    def _executor_command(self, appio_address: str, report: int) -> list[str]:
        settings = self._settings
        command = [
            *(sys.executable, "-P", "-m", "node.executor"),
            *("--appio-address", appio_address),
            *("--device", settings.device),
            *("--release-after", str(settings.release_after)),
            *("--report-fd", str(report)),
        ]
        for module in settings.preload:
            command += ["--preload", module]
        return command

    def _mailbox_command(self, report: int) -> list[str]:
        module = "links.mailbox"
        return [sys.executable, "-P", "-m", module, str(report), str(self._node_config)]

    @property
    def _node_config(self) -> Path:
        """The file with what SuperNode, apps and mailbox are told."""
        return self._settings.state_dir / "node-config.toml"

    def _environment(self) -> dict[str, str]:
        return {
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            **os.environ,
            "FLWR_HOME": str(self._settings.state_dir / "flower"),
            "FLWR_LOG_LEVEL": self._settings.log_level,
            "OMP_NUM_THREADS": str(self._settings.threads),
        }

    def _write_status(self, *, ended: bool = False) -> None:
        """Write `node.json`: process ids, `online` (Flower's node id), `ready` (the warm child)."""
        file = status_file(self._settings.state_dir)
        if ended:
            with suppress(FileNotFoundError):
                file.unlink()
            return
        fresh = file.with_suffix(".new")
        fresh.write_text(json.dumps(self._status), encoding="utf-8")
        fresh.replace(file)


def status_file(state_dir: Path) -> Path:
    """Return the file in which a running node keeps its process ids and how it fares."""
    return state_dir / "node.json"


def _raise_asked_to_stop(number: int, frame: FrameType | None) -> None:
    raise _AskedToStop(number)


def _say(text: str) -> None:
    print(f"flwr-distill node: {text}", file=sys.stderr, flush=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
