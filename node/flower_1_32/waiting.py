"""Lets a node's polls for messages wait at the SuperLink, in place of heartbeats.

Apart from `timing`, which the worker imports too: there, names of our other packages are the app
bundle's own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest, SendNodeHeartbeatResponse
from flwr.supercore.retry import RetryInvoker

from flwr_distill.node.flower.timing import can_override
from flwr_distill.node.pace import Pace
from flwr_distill.protocol.superlink import WAIT, answered

LATE = 60.0
"""Seconds after the end of its wait at which a poll counts as lost."""
COUNTS = 30.0
"""Seconds for which a poll stands for heartbeats.

The SuperLink takes it as one, and the node counts as online for 60 s after it. Flower may send the
next up to 22.5 s after one that was left out, and a call of 5 s may be lost.
"""


def patch_waiting(pace: Pace) -> bool:
    """Ask the SuperLink to answer this node's polls only when there is a message.

    One that does not know how answers at once, and the node polls again at its pace.
    """
    from flwr.supernode import start_client_internal

    name = "_make_fleet_connection_retry_invoker"
    if not can_override("how a SuperNode polls for messages", hasattr(start_client_internal, name)):
        return False
    make: Callable[..., RetryInvoker] = getattr(start_client_internal, name)

    def make_invoker(**arguments: Any) -> RetryInvoker:
        invoker = make(**arguments)
        let_looks_wait(invoker, pace)
        return invoker

    setattr(start_client_internal, name, make_invoker)
    return True


def let_looks_wait(invoker: RetryInvoker, pace: Pace) -> None:
    """Have an invoker's polls wait as long as the pace draws; tell the pace how long each took.

    Heartbeats are left out where polls stand for them: at a SuperLink that lets polls wait.
    """
    invoke = invoker.invoke
    start = -math.inf

    def invoke_look(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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
                start = -math.inf  # it may not have come to the SuperLink
                raise
            pace.polled(time.monotonic() - start)
            return response

        seconds = pace.draw_wait()
        header = (WAIT, f"{seconds:.3f}")
        return invoke(poll, *args, metadata=(header,), timeout=seconds + LATE, **kwargs)

    invoker.invoke = invoke_look  # type: ignore[method-assign]
