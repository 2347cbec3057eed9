"""Nodes' polls for messages wait at the SuperLink until there is one, and are heartbeats.

Flower answers each poll at once, so that nodes must poll often to learn soon of a message, and many
nodes that rest fill a SuperLink with polls. A poll that waits costs one call, however long. A node
that rests then calls for its heartbeats more often than for its polls, so a poll is one.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse

from flwr_distill.flower.line_1_32.retries import WAIT

LONGEST = 60.0
"""Seconds: more than a node of ours asks for, and less than proxies give a call without bytes."""
MOST = 3000
"""Polls that wait at a time; each has a thread. Further ones are answered at once."""
_LOOK = "/flwr.proto.Fleet/PullMessages"


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
        """Give an event that is set when it rings for a node; None if too many wait.

        A node has one: its earlier poll, if any, wakes.
        """
        bell: threading.Event | None = threading.Event()
        with self._lock:
            earlier = self._waiting.get(node_id)
            if earlier is not None:
                earlier.set()
            elif len(self._waiting) >= self._most:
                bell = None
            if bell is not None:
                self._waiting[node_id] = bell
        try:
            yield bell
        finally:
            with self._lock:
                if bell is not None and self._waiting.get(node_id) is bell:
                    del self._waiting[node_id]


class WaitingPolls(grpc.ServerInterceptor):
    """Lets polls wait that ask for it; comes after the interceptors that admit a node.

    Parameters
    ----------
    doorbell : Doorbell
        Rings when there is a message for a node.
    acknowledge : callable
        Takes the id of a node that has polled, and Flower's interval of heartbeats in seconds.
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
        if handler_call_details.method != _LOOK or not seconds or handler is None:
            return handler

        def poll(
            request: PullMessagesRequest, context: grpc.ServicerContext
        ) -> PullMessagesResponse:
            response: PullMessagesResponse
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
