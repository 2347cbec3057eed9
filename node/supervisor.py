"""Supervises a node's processes: SuperNode, executor and, with a peer address, mailbox.

If one ends, all restart: a SuperNode whose executor died would wait for its reply forever, and an
executor's task is void without its SuperNode. On SIGTERM a SuperNode signs off, so strategies get
an error for it at once. After SIGKILL the SuperLink refuses the node's key for up to a minute.
"""

from __future__ import annotations

import json
import math
import os
import random
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from flwr_distill.base import json_lines
from flwr_distill.base.text import counted
from flwr_distill.links.loopback import is_loopback
from flwr_distill.node.bell import Bell
from flwr_distill.node.bundle import folder_of_bundles
from flwr_distill.node.notes import Notes, NotesError
from flwr_distill.node.nursery import EXECUTOR, MAILBOX, NURSERY, PARTS, SUPERNODE
from flwr_distill.node.packages import installed_packages
from flwr_distill.node.peers import check_peers
from flwr_distill.node.policy import OPEN, Policy, described, not_enforced
from flwr_distill.node.processes import Process, start_bound, start_nursery, stop
from flwr_distill.node.reachability import check_superlink
from flwr_distill.node.remedies import KILLED
from flwr_distill.node.run_records import RunRecords
from flwr_distill.node.sandbox import sandbox_command, why_exposed, why_no_sandbox
from flwr_distill.node.secret import appio_secret, holdout_secret
from flwr_distill.node.settings import (
    FLOWER_HOME,
    NODE_CONFIG,
    NodeConfigValue,
    NodeError,
    NodeSettings,
    flat_toml,
)
from flwr_distill.node.stock import (
    QUIET,
    appio_arguments,
    check_another,
    connection_arguments,
    environment,
    is_another,
    is_stock,
    supernode_command,
)
from flwr_distill.protocol.messages import HOLDOUT, HOLDOUT_SECRET
from flwr_distill.storage.store import remove_old_runs
from flwr_distill.task.errors import DatasetError

MAILBOX_ENVIRONMENT = {"GRPC_VERBOSITY": "info"}
"""Makes gRPC log refused TLS handshakes, which Flower silences."""

_MAX_PAUSE = 10.0
_SWEEP = 3600.0
_DAY = 86_400.0
_SETTLED_AFTER = 30.0
_REPORT_TIMEOUT = 10.0


class _StopSignal(BaseException):
    pass


class _Part:
    """A supervised process and the notes that it sends: reports, each a kind and a value."""

    def __init__(
        self,
        name: str,
        command: Callable[[int], Sequence[str]],
        env: dict[str, str],
        *inherited: int,
    ):
        self.name = name
        self.reports, writer = Notes.pair()
        with writer:
            self.process = start_bound(
                command(writer.fileno()), env=env, pass_fds=[writer.fileno(), *inherited]
            )


class Node:
    """Runs a node until SIGTERM or SIGINT."""

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._node_config = settings.state_dir / NODE_CONFIG
        self._status: dict[str, Any] = {"pid": os.getpid(), "starts": 0}
        self._parts: list[_Part] = []
        self._nursery: Process | None = None
        self._nursery_folder = Path()
        self._packages: frozenset[tuple[str, int]] = frozenset()
        self._folder = ExitStack()
        self._sandboxed = False
        self._stock = is_stock()

    def run(self) -> None:
        """Run the node; after SIGTERM or SIGINT stop all of its processes and return.

        NodeError if a restart would not help.
        """
        previous = {
            number: signal.signal(number, _raise_stop_signal)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            self._prepare()
            self._supervise()
        except _StopSignal:
            pass
        finally:
            for number in previous:
                signal.signal(number, signal.SIG_IGN)
            self._stop_parts()
            self._stop_nursery()
            status_file(self._settings.state_dir).unlink(missing_ok=True)
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _prepare(self) -> None:
        settings = self._settings
        try:
            settings.state_dir.mkdir(parents=True, exist_ok=True)
            self._node_config.touch(mode=0o600)
            self._node_config.write_text(flat_toml(app_config(settings)), encoding="utf-8")
        except OSError as error:  # a full disk, or one that may not be written
            raise NodeError(
                error.strerror or str(error),
                where="state-dir",
                value=str(settings.state_dir),
                remedy="free it (space, permissions), or name another folder",
            ) from error
        # Of this process and its parts.
        os.environ[json_lines.VARIABLE] = settings.log_format
        os.environ[json_lines.NODE] = settings.name or settings.place
        json_lines.begin("node")
        self._report_a_kill()
        if exposed := check_peers(settings):
            _log(exposed)
        differs = check_another(settings) if is_another() else ""
        check_superlink(
            settings.superlink,
            insecure=settings.insecure,
            root_certificates=settings.root_certificates,
            timeout=settings.connect_timeout,
        )
        if differs:
            _print(differs)
        self._decide_on_sandbox()
        _log_policy(settings.policy)
        if settings.data is not None and settings.data.is_dir():
            threading.Thread(
                target=_log_data, args=[settings.data, settings.policy], name="data", daemon=True
            ).start()
        if settings.metrics_port is not None:
            from flwr_distill.node.metrics import serve_metrics  # imports Prometheus

            serve_metrics(self._status, settings.metrics_port)

    def _report_a_kill(self) -> None:
        """Log that the node before ended without removing its status file."""
        file = status_file(self._settings.state_dir)
        with suppress(FileNotFoundError):
            since = datetime.fromtimestamp(file.stat().st_mtime).isoformat(" ", "seconds")
            file.unlink()
            _log(f"this node ended without a word after {since}: {KILLED}, or was there no power?")

    def _decide_on_sandbox(self) -> None:
        policy = self._settings.policy
        if policy.sandbox == "none":
            return
        reason = why_no_sandbox()
        if reason and policy.sandbox == "required":
            problem = f"this machine allows no sandbox: {reason}"
            raise NodeError(problem, where="policy: sandbox", value=policy.sandbox)
        self._sandboxed = not reason
        if self._sandboxed and (exposed := why_exposed(self._settings)):
            raise NodeError(exposed, where="policy: sandbox", value=policy.sandbox)
        outcome = (
            "Enforced: the app runs in a sandbox."
            if self._sandboxed
            else f"Not enforced: no sandbox, {reason}. The app has this user's files and network."
        )
        _print(f"Policy: {outcome}")

    def _supervise(self) -> None:
        pause = 1.0
        while True:
            started = time.monotonic()
            self._start_parts()
            reason = self._wait_for_an_end()
            if "online" not in self._status:
                reason += (
                    " before the SuperLink admitted it (is this machine's clock right? Compare "
                    "with `flwr-distill doctor`)"
                )
            self._stop_parts()
            if time.monotonic() - started > _SETTLED_AFTER:
                pause = 1.0
            _log(f"{reason}: restarting all processes in {pause:.0f} s")
            time.sleep(random.uniform(0.5, 1.0) * pause)  # else all nodes of a SuperLink at once
            pause = min(2 * pause, _MAX_PAUSE)

    def _start_parts(self) -> None:
        port = _free_port()
        self._start_nursery()
        env = self._environment()
        # Apps without a sandbox can write there: nothing of earlier ones is run again.
        shutil.rmtree(folder_of_bundles(Path(env["FLWR_HOME"])), ignore_errors=True)
        self._status["starts"] += 1
        # One by one, so that a stop signal in between finds those that have started.
        if self._stock:
            command = supernode_command(self._settings, self._node_config, port)
            self._parts.append(_Part("supernode", lambda report: command, environment(env)))
        else:
            with Bell.ends() as (wait, ring):
                command_of = partial(self._supernode_command, port, ring)
                self._parts.append(_Part("supernode", command_of, env, ring))
                command_of = partial(self._executor_command, port, wait)
                self._parts.append(_Part("executor", command_of, env, wait))
        if self._settings.peer_address is not None:
            env |= MAILBOX_ENVIRONMENT
            self._parts.append(_Part("mailbox", self._mailbox_command, env))
        self._status |= {part.name: part.process.pid for part in self._parts}
        if self._nursery is not None:
            self._status["nursery"] = self._nursery.pid
        self._write_status()

    def _start_nursery(self) -> None:
        """Start the nursery of the parts, unless one runs that is no older than any package."""
        if self._stock or sys.platform != "linux" or NURSERY in os.environ:
            return
        packages = installed_packages()
        runs = self._nursery is not None and self._nursery.poll() is None
        if runs and packages == self._packages:
            return
        self._stop_nursery()
        self._packages = packages
        try:
            folder = Path(self._folder.enter_context(TemporaryDirectory(prefix="node-")))
            self._nursery = start_nursery(folder, PARTS, env=self._environment())
            self._nursery_folder = folder
        except OSError as error:
            _log(f"no nursery, so each process imports for itself, in more memory: {error}")

    def _stop_nursery(self) -> None:
        if self._nursery is not None:
            stop([self._nursery])
            self._nursery = None
        self._folder.close()

    def _wait_for_an_end(self) -> str:
        """Record the parts' reports in the status until a part ends; return which."""
        parts = {part.reports: part for part in self._parts}
        due = -math.inf
        while True:
            if time.monotonic() > due:  # parts may report every two seconds
                remove_old_runs(self._settings.state_dir, self._settings.keep_runs * _DAY)
                RunRecords(self._settings.state_dir).remove_old(self._settings.keep_runs * _DAY)
                due = time.monotonic() + _SWEEP
            for reports in select.select(list(parts), [], [], _SWEEP)[0]:
                try:
                    kind, value = _checked(reports.receive(_REPORT_TIMEOUT))
                except (EOFError, OSError):
                    return f"the {parts[reports].name} ended"
                except NotesError as error:
                    return f"the {parts[reports].name} sent a malformed report ({error})"
                if kind == "unfit":
                    raise NodeError(str(value))
                self._note(kind, value)
                self._write_status()

    def _note(self, kind: str, value: int | str) -> None:
        """Note a report: a worker that was released leaves the node ready, a dead one does not."""
        if kind == "released":
            for gone in ("worker", "device"):
                self._status.pop(gone, None)
            return
        if value == "":
            self._status.pop(kind, None)
            return
        if kind == "worker" and "worker" in self._status:
            for gone in ("ready", "device"):
                self._status.pop(gone, None)
        self._status[kind] = value

    def _stop_parts(self) -> None:
        stop([part.process for part in self._parts])
        for part in self._parts:
            part.reports.close()
        self._parts = []
        for name in self._status.keys() - {"pid", "starts"}:
            del self._status[name]

    def _supernode_command(self, port: int, bell: int, report: int) -> list[str]:
        settings = self._settings
        command = [
            *(sys.executable, "-P", "-m", SUPERNODE),
            *(str(report), str(bell), str(settings.state_dir)),
            *(str(settings.poll_busy), str(settings.poll_idle)),
            *(str(settings.max_rate or ""), settings.quiet_hours or ""),
            *("--superlink", settings.superlink),
            *("--isolation", "process"),
            *appio_arguments(port),
            *("--superexec-auth-secret-file", str(appio_secret(settings.state_dir))),
            *("--node-config", str(self._node_config)),
        ]
        return command + connection_arguments(settings)

    def _executor_command(self, port: int, bell: int, report: int) -> list[str]:
        settings = self._settings
        sandbox: list[str] = []
        if self._sandboxed:
            sandbox = ["--sandbox", json.dumps(sandbox_command(settings, self._environment()))]
            if settings.policy.most_disk is not None:
                sandbox += ["--most-disk", str(settings.policy.most_disk)]
        return [
            *(sys.executable, "-P", "-m", EXECUTOR),
            *("--appio-address", f"127.0.0.1:{port}"),
            *("--secret-file", str(appio_secret(settings.state_dir))),
            *("--state-dir", str(settings.state_dir)),
            *("--policy", settings.policy.model_dump_json(by_alias=True)),
            *(("--loopback",) if is_loopback(settings.superlink) else ()),
            *("--device", settings.device, "--place", str(settings.partition_id or 0)),
            *("--release-after", str(settings.release_after)),
            *(("--keep-warm",) if settings.keep_warm else ()),
            *("--report-fd", str(report), "--bell-fd", str(bell)),
            *(f"--preload={module}" for module in settings.preload),
            *sandbox,
        ]

    def _mailbox_command(self, report: int) -> list[str]:
        return [sys.executable, "-P", "-m", MAILBOX, str(report), str(self._node_config)]

    def _environment(self) -> dict[str, str]:
        nursery = {} if self._nursery is None else {NURSERY: str(self._nursery_folder)}
        return {
            **QUIET,
            **os.environ,
            **nursery,
            "FLWR_HOME": str(self._settings.state_dir / FLOWER_HOME),
            "FLWR_LOG_LEVEL": self._settings.log_level,
            "OMP_NUM_THREADS": str(self._settings.threads),
        }

    def _write_status(self) -> None:
        """Write `node.json`: process ids, `online` (Flower's node id), `ready` (last warm worker).

        `worker` and `device` are there while they run, `moves` while a message or reply takes
        seconds to move, and `quiet` in quiet hours: the local time at which they end. A full disk
        does not end the node.
        """
        file = status_file(self._settings.state_dir)
        temporary = file.with_suffix(".new")
        try:
            temporary.write_text(json.dumps(self._status), encoding="utf-8")
            temporary.replace(file)
        except OSError as error:
            _log(f"{file} is not writable: {error}")
            temporary.unlink(missing_ok=True)


def _checked(report: list[Any]) -> tuple[str, int | str]:
    match report:
        case ["online" | "worker" | "ready" | "released" as kind, int(value)]:
            return kind, value
        case ["unfit" | "device" | "quiet" | "moves" as kind, str(text)]:
            return kind, text
    raise NotesError("a report of no known kind")


def status_file(state_dir: Path) -> Path:
    """Return the file with the state and process ids of a running node."""
    return state_dir / "node.json"


def app_config(settings: NodeSettings) -> dict[str, NodeConfigValue]:
    """The node config that apps see, with the secret that draws its held-out samples."""
    config = settings.app_config
    if HOLDOUT in config:
        config[HOLDOUT_SECRET] = holdout_secret(settings.state_dir).hex()
    return config


def _log_policy(policy: Policy) -> None:
    if policy == OPEN:
        lines = ["open, runs may ask for anything (--policy hospital, or a file, refuses)"]
    else:
        lines = [*described(policy), *not_enforced(policy)]
    for line in lines:
        _print(f"Policy: {line}")


def _log_data(folder: Path, policy: Policy) -> None:
    """Log what a folder of images has, for those who start the node; never ends the node."""
    from flwr_distill.task.survey import survey  # here: imports Pillow

    try:
        overview = survey(folder, decode=False)
        lines = [overview.in_a_line()]
        for name in policy.classes or ():
            if (count := overview.counts.get(name, 0)) < policy.fewest_of_a_class:
                lines.append(
                    f"class {name} has {counted(count, 'sample')}, and fewest-of-a-class is "
                    f"{policy.fewest_of_a_class}: take it out of the policy's classes"
                )
    except DatasetError as error:
        lines = [str(error)]
    for line in lines:
        _log(f"data={folder}: {line}")


def _log(line: str) -> None:
    _print(f"flwr-distill node: {line}")


def _print(line: str) -> None:
    text = json_lines.written(line) if json_lines.wanted() else line
    print(text, file=sys.stderr, flush=True)


def _raise_stop_signal(number: int, frame: FrameType | None) -> None:
    raise _StopSignal(number)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
