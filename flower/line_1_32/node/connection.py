"""A node's connection to its SuperLink: calls go in batches, are retried, and have deadlines."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest, SendNodeHeartbeatResponse
from flwr.supercore.retry import RetryInvoker

from flwr_distill.flower.line_1_32.node.together import TogetherStub
from flwr_distill.flower.line_1_32.retries import (
    WAIT,
    answered,
    limit_calls,
    overloaded,
    retry_also,
)
from flwr_distill.flower.timing import can_override
from flwr_distill.node.pace import Pace

LONGEST_CALL = 3600.0
"""Seconds in which the SuperLink must answer a call: nodes may send large models over slow lines.

Heartbeats notice a lost SuperLink sooner.
"""
LATE = 60.0
"""Seconds after the end of its wait at which a poll counts as lost."""
COUNTS = 30.0
"""Seconds for which a poll replaces heartbeats.

The SuperLink counts it as one, and the node as online for 60 s after it. Flower may send the next
heartbeat up to 22.5 s after a skipped one, and a call of 5 s may be lost.
"""


def patch_connection(pace: Callable[[], Pace], refused: Callable[[str], None]) -> bool:
    """Let the SuperNode's calls wait for an overloaded SuperLink, and go in batches.

    Flower waits only while the SuperLink is away, and its calls have no deadline. Any other error
    ends the SuperNode, or its heartbeats alone, or loses a reply. Waits grow to 20 s and are drawn,
    so nodes do not come back all at once. Replies are signed with the key that logs in.

    `pace` gives the pace of the node whose connection is made; `refused` gets the SuperLink's
    reason for not admitting the node.
    """
    from flwr.supernode import start_client_internal as loop

    make_name, connect_name = "_make_fleet_connection_retry_invoker", "grpc_request_response"
    present = hasattr(loop, make_name) and hasattr(loop, connect_name)
    if not can_override("a SuperNode's connection", present):
        return False
    make: Callable[..., RetryInvoker] = getattr(loop, make_name)
    connect = getattr(loop, connect_name)
    parameters = inspect.signature(connect)

    def make_invoker(**arguments: Any) -> RetryInvoker:
        invoker = make(**arguments)
        retry_also(invoker, _is_busy)
        limit_calls(invoker, LONGEST_CALL)
        let_looks_wait(invoker, pace())
        return invoker

    def connect_together(*arguments: Any, **named: Any) -> Any:
        keys = parameters.bind(*arguments, **named).arguments.get("authentication_keys")
        stub = partial(TogetherStub, key=keys[0] if keys else None, refused=refused)
        return connect(*arguments, adapter_cls=stub, **named)

    setattr(loop, make_name, make_invoker)
    setattr(loop, connect_name, connect_together)
    return True


def _is_busy(error: grpc.RpcError) -> bool:
    return error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED or overloaded(error)


def let_looks_wait(invoker: RetryInvoker, pace: Pace) -> None:
    """Have an invoker's polls wait as long as the pace draws; report to it how long each took.

    Heartbeats are skipped where polls replace them: at a SuperLink that lets polls wait.
    """
    invoke = invoker.invoke
    start = -math.inf

    def invoke_poll(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        request = args[0] if args else kwargs.get("request")
        counts = pace.has_waited and time.monotonic() - start < COUNTS
        if isinstance(request, SendNodeHeartbeatRequest) and counts:
            return SendNodeHeartbeatResponse(success=True)
        if not isinstance(request, PullMessagesRequest):
            return invoke(target, *args, **kwargs)

        def poll(**kwargs: Any) -> Any:
            nonlocal start
            start = time.monotonic()
            try:
                response = answered(target)(**kwargs)
            except BaseException:
                start = -math.inf  # it may not have reached the SuperLink
                raise
            pace.polled(time.monotonic() - start)
            return response

        seconds = pace.draw_wait()
        header = (WAIT, f"{seconds:.3f}")
        return invoke(poll, *args, metadata=(header,), timeout=seconds + LATE, **kwargs)

    invoker.invoke = invoke_poll  # type: ignore[method-assign]
