"""What to do when a SuperLink has too much to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc

if TYPE_CHECKING:
    from flwr.supercore.retry import RetryInvoker

_DATABASE = ("database is locked", "QueuePool limit")
"""Of SQLite, which lets one write at a time and the others wait for 5 s; and of SQLAlchemy, which
has 15 connections and lets a call wait 30 s for one. Flower passes both on."""


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
