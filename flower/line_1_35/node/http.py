"""The connection from a node's executor and its child to the node's SuperNode, over HTTP."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import flwr.proto.runtime_pb2 as messages
import httpx
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.runtime import RuntimeHttpClient

REFUSED = httpx.HTTPError
"""Raised by a call that the SuperNode refuses or does not answer within Flower's 30 s."""
TOO_LATE = ObjectPushError
"""Raised by sending an object after the SuperNode has sent the reply and deleted it."""

_AWAY = (httpx.codes.BAD_GATEWAY, httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.GATEWAY_TIMEOUT)


class HttpAppIo(ABC):
    """A SuperNode's API for apps at ``host:port``, for one task at a time.

    Without root certificates it is plain HTTP, on loopback. The secret signs claims of tasks, which
    any user of the machine could make otherwise. Lines of Flower differ in how a task is claimed.
    """

    claiming: tuple[str, ...]
    """Names of the calls that the secret signs."""

    def __init__(
        self, address: str, root_certificates: bytes | None, secret: bytes | None = None
    ) -> None:
        version = RuntimeVersionHttpInterceptor("flwr-clientapp")
        signing: list[Any] = []
        if secret is not None:
            signing = [
                SuperExecAuthHttpInterceptor(
                    master_secret=secret,
                    protected_methods=[f"/flwr.proto.Runtime/{name}" for name in self.claiming],
                )
            ]
        self._token = _TaskToken()
        # Without Flower's retries: its retry code sends SIGINT to its own process at a 401.
        self._claims, self._calls = (
            RuntimeHttpClient.from_server_address(
                address, root_certificates is None, root_certificates, [version, *interceptors]
            )
            for interceptors in (signing, [self._token])
        )

    def claim(self) -> str | None:
        """Claim the oldest pending task: its token, or None if none is pending or it is away."""
        try:
            return self._claimed(self._claims)
        except httpx.TransportError:
            return None
        except httpx.HTTPStatusError as error:
            if error.response.status_code in _AWAY:
                return None
            raise

    @abstractmethod
    def _claimed(self, calls: Any) -> str | None:
        """As `claim`, by this line's calls; raises httpx's errors."""

    def calls(self, token: str) -> Any:
        """The calls of a task, by their names in Flower; those of the task before it end."""
        self._token.inner = RuntimeTokenHttpInterceptor(token)
        return self._calls


def pull_message(calls: Any) -> Any | None:
    """Pull a task's message without content; None if it has not arrived."""
    response = calls.PullMessages(messages.PullAppMessagesRequest())
    return response if response.messages_list else None


def has_ended(calls: Any) -> bool:
    """Whether the SuperNode has ended the task: its run has ended."""
    try:
        calls.SendTaskHeartbeat(messages.SendTaskHeartbeatRequest())
    except httpx.HTTPStatusError as error:
        return error.response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)
    except httpx.HTTPError:
        pass
    return False


def pull_task_input(calls: Any) -> Any:
    """Pull a task's run, app bundle and context."""
    return calls.PullTaskInput(messages.PullTaskInputRequest())


class _TaskToken:
    """Signs with the present task's token, so that one connection serves all tasks."""

    inner: RuntimeTokenHttpInterceptor

    def intercept(self, context: Any, call_next: Any) -> httpx.Response:
        return self.inner.intercept(context, call_next)
