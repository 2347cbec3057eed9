"""How nodes and servers call a SuperLink that may be overloaded or away."""

from __future__ import annotations

from collections.abc import Callable
from logging import ERROR
from typing import TYPE_CHECKING, Any

import grpc
from flwr.common import log

if TYPE_CHECKING:
    from flwr.supercore.retry import RetryInvoker
    from flwr.supercore.retry.retry_invoker import RetryState

WAIT = "flwr-distill-wait"
"""Header of a node's poll for messages: seconds for which it may wait at the SuperLink.

Ours answers once there is a message, or after these seconds, and counts the poll as a heartbeat;
any other answers at once.
"""
_DATABASE = ("database is locked", "database or disk is full", "QueuePool limit")
"""Errors that pass: others wait 5 s for SQLite's one writer, and 30 s for one of SQLAlchemy's 15
connections; a full disk may be cleared. Flower passes them on."""


def overloaded(error: grpc.RpcError) -> bool:
    """Whether a call failed because the SuperLink was too busy, and may be retried.

    gRPC cancels a call that no thread has taken within 30 s.
    """
    code = error.code()
    return code == grpc.StatusCode.CANCELLED or (
        code == grpc.StatusCode.UNKNOWN
        and any(text in (error.details() or "") for text in _DATABASE)
    )


def retry_also(invoker: RetryInvoker, passes: Callable[[grpc.RpcError], bool]) -> None:
    """Have an invoker retry also after errors for which `passes` is true."""
    gives_up = invoker.should_giveup

    def should_give_up(error: Exception) -> bool:
        passing = isinstance(error, grpc.RpcError) and passes(error)
        return not passing and gives_up is not None and gives_up(error)

    invoker.should_giveup = should_give_up


def limit_calls(invoker: RetryInvoker, within: float) -> None:
    """Give an invoker's calls so many seconds, after which the SuperLink counts as away.

    Flower's calls have no deadline, except heartbeats: a call whose answer is lost, as when the
    SuperLink's machine loses power, would never end. It is retried, as after any lost connection.
    """
    invoke = invoker.invoke

    def invoke_within(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if "timeout" not in kwargs:
            target, kwargs = answered(target), {**kwargs, "timeout": within}
        return invoke(target, *args, **kwargs)

    invoker.invoke = invoke_within  # type: ignore[method-assign]


def limit_absence(invoker: RetryInvoker, within: float) -> None:
    """Let an invoker's calls fail once the SuperLink has been away for so many seconds.

    Flower waits for ever. After the first such failure, no other call waits again.
    """
    gives_up = invoker.on_giveup

    def give_up(state: RetryState) -> None:
        error = state.exception
        away = isinstance(error, grpc.RpcError) and error.code() == grpc.StatusCode.UNAVAILABLE
        if away and invoker.max_time and state.elapsed_time >= invoker.max_time:
            log(
                ERROR,
                "The SuperLink has been away for %.0f minutes: this run ends. Its last checkpoint "
                'is kept; once the SuperLink is back, resume it by resume="latest"',
                invoker.max_time / 60,
            )
            invoker.max_time = 0.0
        if gives_up is not None:
            gives_up(state)

    invoker.max_time, invoker.on_giveup = within, give_up


def answered(target: Callable[..., Any]) -> Callable[..., Any]:
    """A call whose SuperLink counts as away if it does not answer within the `timeout`."""

    def call(*args: Any, timeout: float, **kwargs: Any) -> Any:
        try:
            return target(*args, timeout=timeout, **kwargs)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise NoAnswerError(timeout) from error
            raise

    return call


class NoAnswerError(grpc.RpcError):
    """A call was not answered in time: its code is that of a SuperLink that is away."""

    def __init__(self, within: float) -> None:
        super().__init__(f"no answer in {within:.0f} s")

    def code(self) -> grpc.StatusCode:
        """UNAVAILABLE, after which Flower waits and retries."""
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        """Text of the error."""
        return str(self)
