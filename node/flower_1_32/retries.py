"""A node waits for a SuperLink that has too much to do, or is silent, as for one that is away.

Apart from `timing`, which the worker imports too: there, names of our other packages are the app
bundle's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from flwr.supercore.retry import RetryInvoker

from flwr_distill.node.flower.timing import can_override
from flwr_distill.protocol.superlink import limit_calls, overloaded, retry_also

LONGEST_CALL = 3600.0
"""Seconds in which the SuperLink must answer a call: nodes may send large models over slow lines.

That it is lost they learn sooner, by their heartbeats.
"""


def patch_retries() -> bool:
    """Let the SuperNode wait and try again when the SuperLink has too many calls, or is silent.

    Flower does so only while the SuperLink is away, and its calls have no deadline. Any other error
    ends the SuperNode, or its heartbeats alone, or loses a reply. Waits grow to 20 s and are drawn,
    so nodes do not come back all at once.
    """
    from flwr.supernode import start_client_internal

    name = "_make_fleet_connection_retry_invoker"
    if not can_override(
        "what a SuperNode takes for an outage", hasattr(start_client_internal, name)
    ):
        return False
    make: Callable[..., RetryInvoker] = getattr(start_client_internal, name)

    def make_invoker(**arguments: Any) -> RetryInvoker:
        invoker = make(**arguments)
        retry_also(invoker, has_too_much_to_do)
        limit_calls(invoker, LONGEST_CALL)
        return invoker

    setattr(start_client_internal, name, make_invoker)
    return True


def has_too_much_to_do(error: grpc.RpcError) -> bool:
    """Whether a SuperLink had no thread for a call, or came to it too late."""
    return error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED or overloaded(error)
