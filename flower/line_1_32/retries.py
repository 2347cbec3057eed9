"""How nodes and servers call a SuperLink, which may have too much to do or be lost."""

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

One of ours answers once there is a message, or after these seconds, and takes the poll as a
heartbeat; any other answers at once.
"""
_DATABASE = ("database is locked", "database or disk is full", "QueuePool limit")
"""Of SQLite, which lets one write at a time and the others wait for 5 s, and whose disk someone may
clear; and of SQLAlchemy, which has 15 connections and lets a call wait 30 s for one. Flower passes
all of them on."""


def overloaded(error: grpc.RpcError) -> bool:
    """Whether a call failed since the SuperLink came to it too late: it may be made again.

    gRPC cancels a call that no thread has taken within 30 s.
    """
    code = error.code()
    return code == grpc.StatusCode.CANCELLED or (
        code == grpc.StatusCode.UNKNOWN
        and any(text in (error.details() or "") for text in _DATABASE)
    )


def retry_also(invoker: RetryInvoker, passes: Callable[[grpc.RpcError], bool]) -> None:
    """Let an invoker wait and try again after errors that pass, besides those it knows."""
    gives_up = invoker.should_giveup

    def gives_up_unless_it_passes(error: Exception) -> bool:
        passing = isinstance(error, grpc.RpcError) and passes(error)
        return not passing and gives_up is not None and gives_up(error)

    invoker.should_giveup = gives_up_unless_it_passes


def limit_calls(invoker: RetryInvoker, within: float) -> None:
    """Give an invoker's calls so many seconds, after which the SuperLink counts as away.

    Flower gives none but to heartbeats: a call whose answer is lost, as when the SuperLink's
    machine loses power, would never end. It is made again, as after any loss of the connection.
    """
    invoke = invoker.invoke

    def invoke_within(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if "timeout" not in kwargs:
            target, kwargs = answered(target), {**kwargs, "timeout": within}
        return invoke(target, *args, **kwargs)

    invoker.invoke = invoke_within  # type: ignore[method-assign]


def limit_absence(invoker: RetryInvoker, within: float) -> None:
    """Let an invoker's calls fail once the SuperLink has been away for so many seconds.

    Flower waits for ever. After the first call that fails so, no other one waits anew.
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
        """UNAVAILABLE, which Flower waits for and tries again."""
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        """What happened."""
        return str(self)
