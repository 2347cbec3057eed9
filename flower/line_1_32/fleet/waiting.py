"""Nodes' polls for messages wait at the SuperLink until there is one, and count as heartbeats.

Flower answers each poll at once, so nodes must poll often, and many idle nodes fill a SuperLink
with polls. A waiting poll costs one call, however long it takes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL

from flwr_distill.flower.line_1_32.retries import WAIT

LONGEST = 60.0
"""Seconds: more than a node of ours requests, and less than proxies allow a call without bytes."""
MOST = 3000
"""Polls that wait at a time; each has a thread. Further ones are answered at once."""
_POLL = "/flwr.proto.Fleet/PullMessages"


class Doorbell:
    """Wakes the polls of nodes that wait for a message."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._waiting: dict[int, threading.Event] = {}

    def ring(self, node_id: int) -> None:
        """Wake a node's poll: there is a message."""
        with self._lock:
            if (bell := self._waiting.get(node_id)) is not None:
                bell.set()

    @contextmanager
    def heard_by(self, node_id: int) -> Iterator[threading.Event | None]:
        """Yield an event that is set when it rings for a node; None if too many wait.

        A node waits with one poll: its earlier one, if any, wakes.
        """
        bell = threading.Event()
        with self._lock:
            earlier = self._waiting.get(node_id)
            is_full = earlier is None and len(self._waiting) >= self._most
            if not is_full:
                self._waiting[node_id] = bell
            if earlier is not None:
                earlier.set()
        try:
            yield None if is_full else bell
        finally:
            with self._lock:
                if self._waiting.get(node_id) is bell:
                    del self._waiting[node_id]


class WaitingPolls(grpc.ServerInterceptor):
    """Lets polls wait that request it; comes after the interceptors that admit a node.

    `acknowledge` takes the id of a node that polls, and Flower's interval of heartbeats in seconds.
    """

    def __init__(self, doorbell: Doorbell, acknowledge: Callable[[int, float], bool]) -> None:
        self._doorbell = doorbell
        self._acknowledge = acknowledge

    def intercept_service(
        self,
        continuation: Callable[[Any], Any],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Wrap the handler of a poll."""
        handler = continuation(handler_call_details)
        headers = dict(handler_call_details.invocation_metadata)
        seconds = _seconds(headers.get(WAIT, "0"))
        if handler_call_details.method != _POLL or not seconds or handler is None:
            return handler

        def poll(request: Any, context: grpc.ServicerContext) -> Any:
            self._acknowledge(request.node.node_id, HEARTBEAT_DEFAULT_INTERVAL)
            with self._doorbell.heard_by(request.node.node_id) as bell:
                response = handler.unary_unary(request, context)
                if response.messages_list or bell is None or not context.add_callback(bell.set):
                    return response
                if not bell.wait(seconds):
                    return response
            if context.is_active():
                response = handler.unary_unary(request, context)
            return response

        return grpc.unary_unary_rpc_method_handler(
            poll,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _seconds(text: str | bytes) -> float:
    try:
        seconds = float(text)
    except ValueError:
        return 0.0
    return min(max(seconds, 0.0), LONGEST) if math.isfinite(seconds) else 0.0
