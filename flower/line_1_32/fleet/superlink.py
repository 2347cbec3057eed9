"""Client of a SuperLink's Control API."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import grpc
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    StreamLogsRequest,
    UnregisterNodeRequest,
)
from flwr.proto.control_pb2_grpc import ControlStub
from flwr.supercore.constant import NodeStatus
from flwr.supercore.fab import Fab
from flwr.supercore.grpc import GRPC_MAX_MESSAGE_LENGTH
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, public_key_to_bytes

from flwr_distill.flower.control import (
    KnownNode,
    KnownRun,
    OutageError,
    RunStatus,
    SuperLinkError,
    UnknownRunError,
    User,
)
from flwr_distill.node.proxies import proxy_hint, proxy_of
from flwr_distill.task.settings import RunConfigValue

_OUTAGE = {
    *(grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL),
    *(grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED),
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""What a call may end with while a SuperLink stops or restarts."""
_REFUSED = {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED}
_OPTIONS = [
    ("grpc.max_send_message_length", GRPC_MAX_MESSAGE_LENGTH),
    ("grpc.max_receive_message_length", GRPC_MAX_MESSAGE_LENGTH),
]


class Control:
    """A connection to the Control API of a SuperLink; without root certificates, without TLS.

    A `user` is for a gate in front of it.
    """

    def __init__(
        self, address: str, root_certificates: Path | None = None, user: User | None = None
    ) -> None:
        self._address = address
        self._root_certificates = root_certificates
        options = [*_OPTIONS, ("grpc.enable_http_proxy", int(proxy_of(address) is not None))]
        if root_certificates is None:
            self._channel = grpc.insecure_channel(address, options=options)
        else:
            credentials = grpc.ssl_channel_credentials(
                root_certificates.read_bytes(),
                user.key.read_bytes() if user else None,
                user.certificate.read_bytes() if user else None,
            )
            self._channel = grpc.secure_channel(address, credentials, options=options)
        self._stub = ControlStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._channel.close()

    def answers(self, *, timeout: float) -> bool:
        """Whether the SuperLink answers within `timeout` seconds.

        Raises `SuperLinkError` if a gate in front of it does not admit the user.
        """
        try:
            self._stub.ListNodes(ListNodesRequest(), timeout=timeout, wait_for_ready=True)
        except grpc.RpcError as error:
            if error.code() in _REFUSED:
                raise self._error(
                    f"does not admit you: {error.details()}",
                    "give --user-certificate and --user-key, of `flwr-distill certs user`",
                ) from error
            return False
        return True

    def wait(self, timeout: float, *, is_up: Callable[[], bool] = lambda: True) -> None:
        """Wait until the SuperLink answers, for `timeout` seconds at most and while `is_up`."""
        deadline = time.monotonic() + timeout
        while not self.answers(timeout=1.0):
            if not is_up():
                raise self._error("the SuperLink has ended")
            if time.monotonic() > deadline:
                certificate = (
                    f"is its certificate for that host and from {self._root_certificates}"
                    if self._root_certificates
                    else "does it run without TLS"
                )
                raise self._error(
                    f"no SuperLink answers within {timeout:.0f} s",
                    f"is it the Control API's address, 9093 by default, and {certificate}?"
                    f"{proxy_hint(self._address)}",
                )
            time.sleep(random.uniform(0.05, 0.2))  # a proxy answers at once without a SuperLink

    def _error(self, problem: str, remedy: str = "") -> SuperLinkError:
        return SuperLinkError(problem, where="superlink", value=self._address, remedy=remedy)

    def nodes(self) -> list[KnownNode]:
        """As `flower.control.Control`."""
        try:
            nodes = self._stub.ListNodes(ListNodesRequest(), timeout=10).nodes_info
        except grpc.RpcError as error:
            raise _failed(error) from error
        return [
            KnownNode(
                node.node_id,
                node.status,
                _seconds(node.last_activated_at if node.status == "online" else "")
                or max(map(_seconds, (node.last_deactivated_at, node.registered_at))),
                _open_ssh(node.public_key),
            )
            for node in nodes
        ]

    def start_run(self, bundle: bytes, run_config: Mapping[str, RunConfigValue]) -> int:
        """As `flower.control.Control`."""
        request = StartRunRequest(
            fab=fab_to_proto(Fab(hashlib.sha256(bundle).hexdigest(), bundle, {})),
            override_config=user_config_to_proto(dict(run_config)),
        )
        try:
            response = self._stub.StartRun(request, timeout=60)
        except grpc.RpcError as error:
            kind = OutageError if error.code() in _OUTAGE else SuperLinkError
            raise kind(f"the run was not accepted: {error.details()}") from error
        if not response.HasField("run_id"):
            raise SuperLinkError("the run was not accepted: the SuperLink gives it no id")
        return int(response.run_id)

    def log(self, run_id: int, after: float, seconds: float) -> Iterator[tuple[str, float]]:
        """Parts of a run's log later than the time stamp `after`, each with its own time stamp.

        It ends when the run is over, or after so many seconds; raises as `run_status`.
        """
        request = StreamLogsRequest(run_id=run_id, after_timestamp=after)
        try:
            for part in self._stub.StreamLogs(request, timeout=seconds):
                yield part.log_output, part.latest_timestamp
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                raise _explained(run_id, error) from error

    def run_status(self, run_id: int, *, settle: float = 0.0) -> RunStatus:
        """As `flower.control.Control`."""
        deadline = time.monotonic() + settle
        while True:
            try:
                runs = self._stub.ListRuns(ListRunsRequest(run_id=run_id), timeout=10)
            except grpc.RpcError as error:
                raise _explained(run_id, error) from error
            status = _status(runs.run_dict[run_id])
            if status.finished or time.monotonic() > deadline:
                return status
            time.sleep(0.05)

    def runs_with(self, setting: str, value: str) -> list[int]:
        """As `flower.control.Control`."""
        try:
            runs = self._stub.ListRuns(ListRunsRequest(), timeout=60).run_dict.values()
        except grpc.RpcError as error:
            raise _failed(error) from error
        found = [r for r in runs if r.override_config[setting].string == value]
        return [run.run_id for run in sorted(found, key=lambda r: r.pending_at)]

    def runs(self) -> list[KnownRun]:
        """As `flower.control.Control`."""
        try:
            runs = self._stub.ListRuns(ListRunsRequest(), timeout=10).run_dict.values()
        except grpc.RpcError as error:
            raise _failed(error) from error
        return [
            KnownRun(
                run.run_id,
                _status(run),
                _seconds(run.pending_at),
                _seconds(run.finished_at),
                run.override_config["resume"].string if "resume" in run.override_config else "",
            )
            for run in sorted(runs, key=lambda r: r.pending_at)
        ]

    def stop_run(self, run_id: int) -> None:
        """As `flower.control.Control`."""
        try:
            self._stub.StopRun(StopRunRequest(run_id=run_id), timeout=10)
        except grpc.RpcError as error:
            raise _explained(run_id, error) from error

    def register(self, public_key: str) -> tuple[int, bool]:
        """Register a node's key (OpenSSH); return Flower's node id and whether the key is new."""
        if (node_id := self.node_id(public_key)) is not None:
            return node_id, False
        try:
            key = _flower_format(public_key)
            node_id = self._stub.RegisterNode(
                RegisterNodeRequest(public_key=key), timeout=10
            ).node_id
        except grpc.RpcError as error:
            raise SuperLinkError(
                f"the SuperLink refuses the key: {error.details()}",
                remedy="a key that was unregistered cannot be registered again: issue another",
            ) from error
        self._node_ids[key] = node_id
        return node_id, True

    def unregister(self, node_id: int) -> None:
        """Unregister a node: the SuperLink no longer admits its key."""
        self._stub.UnregisterNode(UnregisterNodeRequest(node_id=node_id), timeout=10)
        self._node_ids = {key: each for key, each in self._node_ids.items() if each != node_id}

    def node_id(self, public_key: str) -> int | None:
        """Return Flower's id of the node with this key, if it is registered."""
        return self._node_ids.get(_flower_format(public_key))

    @cached_property
    def _node_ids(self) -> dict[bytes, int]:
        """Flower's ids by key; cached, since the list of a large fleet is long."""
        return {
            node.public_key: node.node_id
            for node in self._stub.ListNodes(ListNodesRequest(), timeout=10).nodes_info
            if node.status != NodeStatus.UNREGISTERED
        }


def _explained(run_id: int, error: grpc.RpcError) -> SuperLinkError:
    if error.code() == grpc.StatusCode.NOT_FOUND:
        return UnknownRunError(
            f"the SuperLink does not know it: {error.details()}",
            where=f"run {run_id}",
            remedy="without --database a SuperLink loses its runs when it restarts",
        )
    return _failed(error, f"run {run_id}")


def _failed(error: grpc.RpcError, where: str = "") -> SuperLinkError:
    if error.code() in _OUTAGE:
        return OutageError(f"the SuperLink stopped: {error.details()}")
    return SuperLinkError(f"the SuperLink refuses: {error.details()}", where=where)


def _status(run: Any) -> RunStatus:
    status = run.status
    text = ":".join(part for part in (status.status, status.sub_status) if part)
    return RunStatus(text, status.details)


def _seconds(time_stamp: str) -> float:
    """Seconds since 1970 of Flower's time stamp; 0 without one."""
    return datetime.fromisoformat(time_stamp).timestamp() if time_stamp else 0.0


def _open_ssh(key: bytes) -> str:
    """A key of Flower's in the format of OpenSSH; empty if it is none."""
    form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    try:
        return bytes_to_public_key(key).public_bytes(*form).decode()
    except ValueError:  # nodes without authentication choose the bytes
        return ""


def _flower_format(public_key: str) -> bytes:
    return public_key_to_bytes(load_ssh_public_key(public_key.encode()))  # type: ignore[arg-type]
