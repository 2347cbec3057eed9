"""The connection from a node's executor and its child to the node's SuperNode, over gRPC."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import flwr.proto.appio_pb2 as messages
import grpc
from flwr.proto.clientappio_pb2_grpc import ClientAppIoStub
from flwr.supercore.grpc import GRPC_MAX_MESSAGE_LENGTH
from flwr.supercore.inflatable.inflatable_utils import ObjectIdNotPreregisteredError
from flwr.supercore.interceptors import (
    AppIoTokenClientInterceptor,
    RuntimeVersionClientInterceptor,
    SuperExecAuthClientInterceptor,
)
from flwr.supercore.interceptors.superexec_auth_interceptor import CLIENTAPPIO_SUPEREXEC_METHODS

REFUSED = grpc.RpcError
"""Raised by a call that the SuperNode refuses or does not answer."""
TOO_LATE = ObjectIdNotPreregisteredError
"""Raised by sending an object after the SuperNode has sent the reply and deleted it."""

_DEADLINES = {
    "SendTaskHeartbeat": 5.0,
    **dict.fromkeys(("PullMessages", "PushMessages", "PullTaskInput", "PushTaskOutput"), 60.0),
    **dict.fromkeys(("PullObject", "PushObject", "ConfirmMessageReceived"), 600.0),
}
"""Seconds for the calls of a task, on this machine; objects may be large."""
_OPTIONS = [
    ("grpc.max_send_message_length", GRPC_MAX_MESSAGE_LENGTH),
    ("grpc.max_receive_message_length", GRPC_MAX_MESSAGE_LENGTH),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


class AppIo:
    """A SuperNode's API for apps; see `open_channel` for the parameters."""

    def __init__(
        self, address: str, root_certificates: bytes | None, secret: bytes | None = None
    ) -> None:
        self._channel = open_channel(address, root_certificates, secret)
        self._stub = ClientAppIoStub(self._channel)

    def claim(self) -> str | None:
        """Claim the oldest pending task: its token, or None if none is pending or it is away."""
        try:
            pending = self._stub.PullPendingTasks(
                messages.PullPendingTasksRequest(), timeout=10
            ).tasks
            if not pending:
                return None
            claim = messages.ClaimTaskRequest(task_id=pending[0].task_id)
            token = self._stub.ClaimTask(claim, timeout=10).token
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                return None
            raise
        return str(token) or None

    def calls(self, token: str) -> Any:
        """The calls of a task, by their names in Flower."""
        channel = grpc.intercept_channel(self._channel, AppIoTokenClientInterceptor(token))
        stub = ClientAppIoStub(channel)
        return SimpleNamespace(
            **{
                name: partial(getattr(stub, name), timeout=deadline)
                for name, deadline in _DEADLINES.items()
            }
        )


def pull_message(calls: Any) -> Any | None:
    """Pull a task's message without content; None if it has not arrived."""
    try:
        return calls.PullMessages(messages.PullAppMessagesRequest())
    except grpc.RpcError as error:
        if error.code() != grpc.StatusCode.NOT_FOUND:
            raise
        return None


def has_ended(calls: Any) -> bool:
    """Whether the SuperNode has ended the task: its run has ended."""
    try:
        calls.SendTaskHeartbeat(messages.SendTaskHeartbeatRequest())
    except grpc.RpcError as error:
        return error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
    return False


def pull_task_input(calls: Any) -> Any:
    """Pull a task's run, app bundle and context."""
    # The worker's first call: on a very busy machine, a first try to connect may fail.
    return calls.PullTaskInput(messages.PullTaskInputRequest(), wait_for_ready=True)


def open_channel(
    address: str, root_certificates: bytes | None, secret: bytes | None = None
) -> grpc.Channel:
    """Open a channel to a SuperNode's ClientAppIo API, with TLS if there are root certificates.

    The secret signs claims of tasks. Without it any user of the machine could make them: the API is
    on loopback.
    """
    # Without Flower's retries: its retry code sends SIGINT to its own process on UNAUTHENTICATED.
    if root_certificates is None:
        channel = grpc.insecure_channel(address, options=_OPTIONS)
    else:
        credentials = grpc.ssl_channel_credentials(root_certificates)
        channel = grpc.secure_channel(address, credentials, options=_OPTIONS)
    if secret is not None:
        signing = SuperExecAuthClientInterceptor(
            master_secret=secret, protected_methods=CLIENTAPPIO_SUPEREXEC_METHODS
        )
        channel = grpc.intercept_channel(channel, signing)
    return grpc.intercept_channel(channel, RuntimeVersionClientInterceptor("flwr-clientapp"))
