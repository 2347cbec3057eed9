"""Calls of a SuperLink's Control API by Flower's own command, `flwr`, whatever it speaks."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import cached_property
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self
from zipfile import ZipFile

from flwr_distill.flower.control import (
    KnownNode,
    KnownRun,
    OutageError,
    RunStatus,
    SuperLinkError,
    User,
)
from flwr_distill.node.proxies import proxies_named
from flwr_distill.node.settings import flat_toml
from flwr_distill.node.stock import QUIET
from flwr_distill.task.settings import RunConfigValue

_NAME = "ours"
"""Of the SuperLink, in the command's configuration."""
_TIMEOUT = 60.0
_SHORTEST = 15.0
"""Seconds that any call may take: `flwr` imports for some of them, and retries by itself."""
_MAX_TEXT = 500
_HEADING = f"Using SuperLink: {_NAME} "
_OUTAGE = ("is unavailable", "timed out")
"""Words of what `flwr` says where no SuperLink answers: it has no code for that."""


class Control:
    """The calls of a SuperLink; see `flower.control.open_control`."""

    def __init__(
        self,
        address: str,
        root_certificates: Path | None = None,
        user: User | None = None,
        noted: Mapping[str, int] | None = None,
    ) -> None:
        if user is not None:
            raise SuperLinkError(
                "`flwr` shows a gate no certificate",
                where="user-certificate",
                value=user.certificate,
                remedy="call the SuperLink without a gate, or install flwr==1.32.1",
            )
        self._address = address
        self._noted = dict(noted or {})
        self._home = TemporaryDirectory(prefix="flwr-")
        settings: dict[str, Any] = {"address": address, "insecure": root_certificates is None}
        if root_certificates is not None:
            settings["root-certificates"] = str(root_certificates.absolute())
        text = f'[superlink]\ndefault = "{_NAME}"\n[superlink.{_NAME}]\n'
        Path(self._home.name, "config.toml").write_text(
            text + flat_toml(settings), encoding="utf-8"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._home.cleanup()

    def answers(self, *, timeout: float) -> bool:
        """Whether the SuperLink answers within `timeout` seconds."""
        host, _, port = self._address.rpartition(":")
        try:
            if not proxies_named():  # `flwr` takes a second, and tries for minutes
                socket.create_connection((host.strip("[]"), int(port)), timeout).close()
            self._call("list", timeout=timeout)
        except (OutageError, OSError):
            return False
        return True

    def wait(self, timeout: float, *, is_up: Callable[[], bool] = lambda: True) -> None:
        """As `flower.control.Control`."""
        deadline = time.monotonic() + timeout
        while not self.answers(timeout=max(_SHORTEST, deadline - time.monotonic())):
            if not is_up() or time.monotonic() > deadline:
                raise SuperLinkError(
                    f"no SuperLink answers within {timeout:.0f} s",
                    where="superlink",
                    value=self._address,
                    remedy="is it the Control API's address, and does it have TLS as you say?",
                )
            time.sleep(random.uniform(0.5, 1.0))

    def nodes(self) -> list[KnownNode]:
        """As `flower.control.Control`."""
        return [
            KnownNode(
                int(node["node-id"]),
                node["status"],
                _seconds(node["online-at" if node["status"] == "online" else "offline-at"])
                or _seconds(node["created-at"]),
            )
            for node in self._nodes()
        ]

    def start_run(self, bundle: bytes, run_config: Mapping[str, RunConfigValue]) -> int:
        """As `flower.control.Control`."""
        with TemporaryDirectory(prefix="app-") as folder:
            with ZipFile(BytesIO(bundle)) as archive:  # it is our own
                archive.extractall(folder)
            settings = Path(self._home.name, "run.toml")
            settings.write_text(flat_toml(dict(run_config)), encoding="utf-8")
            chosen = ("--run-config", str(settings)) if run_config else ()
            try:
                return int(self._call("run", folder, words=chosen)["run-id"])
            except (OutageError, KeyError, TypeError, ValueError) as error:
                raise SuperLinkError(f"the run was not accepted: {error}") from error

    def log(self, run_id: int, after: float, seconds: float) -> Iterator[tuple[str, float]]:
        """As `flower.control.Control`; marks are numbers of lines."""
        process = self._start("log", str(run_id), _NAME, "--stream", errors=subprocess.DEVNULL)
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        assert process.stdout is not None
        try:
            for number, line in enumerate(process.stdout, start=1):
                if line.startswith(_HEADING) or not line.endswith("\n"):  # cut when time was up
                    continue
                if number > after:
                    yield line, float(number)
        finally:
            timer.cancel()
            process.kill()
            process.communicate()

    def run_status(self, run_id: int, *, settle: float = 0.0) -> RunStatus:
        """As `flower.control.Control`."""
        deadline = time.monotonic() + settle
        while True:
            (run,) = self._call("list", words=("--run-id", str(run_id)))["runs"]
            status = RunStatus(run["status"], run.get("status-details") or "")
            if status.finished or time.monotonic() > deadline:
                return status

    def runs_with(self, setting: str, value: str) -> list[int]:
        """As `flower.control.Control`."""
        problem = f"`flwr` does not show whether a run has {setting} = {value!r}"
        raise SuperLinkError(problem, remedy="install flwr==1.32.1")

    def runs(self) -> list[KnownRun]:
        """As `flower.control.Control`."""
        return [
            KnownRun(
                int(run["run-id"]),
                RunStatus(run["status"], run.get("status-details") or ""),
                _seconds(run["pending-at"]),
                _seconds(run["finished-at"]),
            )
            for run in sorted(self._call("list")["runs"], key=lambda r: r["pending-at"])
        ]

    def stop_run(self, run_id: int) -> None:
        """As `flower.control.Control`."""
        self._call("stop", str(run_id))

    def register(self, public_key: str) -> tuple[int, bool]:
        """As `flower.control.Control`."""
        if (noted := self._noted.get(public_key)) in self._node_ids:
            return int(noted or 0), False
        file = Path(self._home.name, "node.pub")
        file.write_text(public_key + "\n", encoding="utf-8")
        try:
            node_id = int(self._call("supernode", "register", str(file))["node-id"])
        except SuperLinkError as error:
            raise SuperLinkError(
                f"the SuperLink refuses the key: {error}",
                remedy="a key that was registered from elsewhere, or unregistered, cannot be "
                "registered again: issue another",
            ) from error
        self._noted[public_key] = node_id
        self._node_ids.add(node_id)
        return node_id, True

    def unregister(self, node_id: int) -> None:
        """As `flower.control.Control`."""
        self._call("supernode", "unregister", str(node_id))
        self._node_ids.discard(node_id)

    def node_id(self, public_key: str) -> int | None:
        """As `flower.control.Control`; SuperLinkError if its id was not noted."""
        if (noted := self._noted.get(public_key)) is None:
            raise SuperLinkError(
                "`flwr` shows no keys of nodes, and the id of this one is not in nodes.json",
                remedy="run `flwr-distill register` first, or where that file is",
            )
        return noted if noted in self._node_ids else None

    @cached_property
    def _node_ids(self) -> set[int]:
        """Ids of registered nodes; cached, since the list of a large fleet is long."""
        return {int(node["node-id"]) for node in self._nodes()}

    def _nodes(self) -> list[dict[str, Any]]:
        nodes: list[dict[str, Any]] = self._call("supernode", "list")["nodes"]
        return nodes

    def _call(self, *arguments: str, words: tuple[str, ...] = (), timeout: float = _TIMEOUT) -> Any:
        """What the command answers, as JSON.

        OutageError if there is no answer, SuperLinkError if the SuperLink refuses.
        """
        process = self._start(*arguments, _NAME, "--format", "json", *words)
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise OutageError(f"no answer within {timeout:.0f} s") from None
        try:
            answer = json.loads(output)
        except ValueError:
            answer = {"success": False, "error-message": (errors or output).strip()}
        if isinstance(answer, dict) and answer.get("success"):
            return answer
        text = " ".join(str(answer.get("error-message", answer)).split())[-_MAX_TEXT:]
        kind = OutageError if any(word in text.lower() for word in _OUTAGE) else SuperLinkError
        raise kind(text)

    def _start(self, *words: str, errors: int = subprocess.PIPE) -> subprocess.Popen[str]:
        program = Path(sys.executable).with_name("flwr")
        return subprocess.Popen(
            [str(program), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**QUIET, **os.environ, "FLWR_HOME": self._home.name},
        )


def _seconds(text: str) -> float:
    """Seconds since 1970 of a time that the command shows; 0 for ``N/A``."""
    return 0.0 if text == "N/A" else datetime.fromisoformat(text).timestamp()
