"""What to do when a SuperLink has too much to do."""

from __future__ import annotations

from collections.abc import Callable

import grpc
from flwr.supercore.retry import RetryInvoker


def database_locked(error: grpc.RpcError) -> bool:
    """Whether a call failed because so many wrote to the SuperLink's SQLite file at once.

    SQLite lets one write at a time and the others wait for 5 s; Flower passes on what comes then.
    The call had no effect and may be made again.
    """
    known = error.code() == grpc.StatusCode.UNKNOWN
    return known and "database is locked" in (error.details() or "")


def retry_also(invoker: RetryInvoker, passes: Callable[[grpc.RpcError], bool]) -> None:
    """Let an invoker wait and try again after errors that pass, besides those it knows."""
    gives_up = invoker.should_giveup

    def gives_up_unless_it_passes(error: Exception) -> bool:
        passing = isinstance(error, grpc.RpcError) and passes(error)
        return not passing and gives_up is not None and gives_up(error)

    invoker.should_giveup = gives_up_unless_it_passes
