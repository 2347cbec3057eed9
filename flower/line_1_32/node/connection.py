"""A node's connection to its SuperLink: calls go in batches, are retried, and have deadlines.

The first polls for it, the second pulls its objects, and the third sends the reply with its objects
and confirms the message.
"""

from __future__ import annotations

import inspect
import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import grpc
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesResponse
from flwr.proto.fleet_pb2_grpc import FleetStub
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest, SendNodeHeartbeatResponse
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedResponse,
    PullObjectRequest,
    PushObjectResponse,
)
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.retry import RetryInvoker

from flwr_distill.flower.line_1_32.calls import (
    MAX_BYTES,
    WAIT,
    Batches,
    Outage,
    answered,
    limit_calls,
    overloaded,
    retry_also,
)
from flwr_distill.flower.overrides import can_override
from flwr_distill.node.pace import Pace
from flwr_distill.protocol.signatures import sign


class BatchingStub(FleetStub):
    """Flower's stub of the Fleet API, for one message after the other.

    The pull of a message's first object pulls the others too, and a retry those that have arrived
    since. A reply waits for its objects, up to a size, and is sent with them: the SuperLink stores
    all or nothing, and an announced reply is complete. Calls for the objects before the last one
    succeed at once; if the batch fails, the last one does.

    The node signs its replies with the key. `refused` gets the SuperLink's reason for not admitting
    the node.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        key: EllipticCurvePrivateKey | None = None,
        refused: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(channel)
        self._key = key
        if refused is not None:
            self.RegisterNode = _reporting(self.RegisterNode, refused)
            self.ActivateNode = _reporting(self.ActivateNode, refused)
        self._flower: Any = FleetStub(channel)
        self._together = Batches(self._flower, channel, "Fleet")
        self._lock = threading.Lock()  # Flower pulls and pushes objects from several threads
        self._to_pull: list[str] = []
        self._pulled: dict[str, Any] = {}
        self._received: Any = None
        self._reply: Any = None
        self._missing: set[str] | None = None
        self._to_come: set[str] = set()
        self._waiting: dict[str, Any] = {}
        self.PullMessages = self._pull_messages
        self.PullObject = self._pull_object
        self.ConfirmMessageReceived = self._confirm
        self.PushMessages = self._push_messages
        self.PushObject = self._push_object

    def _pull_messages(self, request: Any, **named: Any) -> Any:
        response = self._flower.PullMessages(request, **named)
        with self._lock:
            trees = response.message_object_trees
            parts = (part.object_id for tree in trees for part in iterate_object_tree(tree))
            self._to_pull, self._pulled = list(dict.fromkeys(parts)), {}
        return response

    def _pull_object(self, request: Any, **named: Any) -> Any:
        name = request.object_id
        with self._lock:
            taken = self._together.taken(request.node, request.run_id, **named)
        if not taken:  # Flower's threads pull several at a time
            return self._flower.PullObject(request, **named)
        with self._lock:
            if name in self._pulled:
                return self._pulled.pop(name)
            others = [other for other in self._to_pull if other not in (name, *self._pulled)]
            requests = [request]
            requests += [
                PullObjectRequest(node=request.node, run_id=request.run_id, object_id=other)
                for other in others
            ]
            answers = self._together.make(request.node, request.run_id, requests, **named)
            for each, answer in zip(requests, answers, strict=False):
                if answer.object_available:
                    self._to_pull = [left for left in self._to_pull if left != each.object_id]
                    self._pulled[each.object_id] = answer
            self._pulled.pop(name, None)
        return answers[0]

    def _confirm(self, request: Any, **named: Any) -> Any:
        with self._lock:
            if not self._together.taken(request.node, request.run_id, **named):
                return self._flower.ConfirmMessageReceived(request, **named)
            self._received = request
        return ConfirmMessageReceivedResponse()

    def _push_messages(self, request: Any, **named: Any) -> Any:
        header = request.messages_list[0].metadata
        run_id = header.run_id
        if self._key is not None:
            sign(header, self._key)
        with self._lock:
            self._reply, self._missing, self._waiting = None, None, {}
            if not self._together.taken(request.node, run_id, **named):
                return self._flower.PushMessages(request, **named)
            trees = request.message_object_trees
            self._reply = request
            self._to_come = {part.object_id for tree in trees for part in iterate_object_tree(tree)}
            return PushMessagesResponse(objects_to_push=self._to_come)

    def _push_object(self, request: Any, **named: Any) -> Any:
        if self._reply is None:
            return self._flower.PushObject(request, **named)
        with self._lock:

            def make(requests: Sequence[Any]) -> list[Any]:
                return self._together.make_all(request.node, request.run_id, requests, **named)

            self._to_come.discard(request.object_id)
            self._waiting[request.object_id] = request
            if self._to_come:
                if sum(len(each.object_content) for each in self._waiting.values()) <= MAX_BYTES:
                    return PushObjectResponse(stored=True)
                if self._missing is None:  # the SuperLink may have much of a large reply
                    self._missing = set(make(self._first())[0].objects_to_push)
            if self._missing is None:
                answers = make([*self._first(), *self._waiting.values()])
                self._missing = set()
            else:
                names = self._waiting.keys() & self._missing
                answers = make([self._waiting[name] for name in names])
            self._waiting, self._received = {}, None
            stored = [each.stored for each in answers if isinstance(each, PushObjectResponse)]
            return PushObjectResponse(stored=all(stored))

    def _first(self) -> list[Any]:
        """Calls before those of a reply's objects."""
        return [self._reply, *([self._received] if self._received else [])]


def _reporting(call: Callable[..., Any], refused: Callable[[str], None]) -> Callable[..., Any]:
    """A call that passes the details of an error to `refused`, and raises it."""

    def make(request: Any, **named: Any) -> Any:
        try:
            return call(request, **named)
        except grpc.RpcError as error:
            refused(error.details() or "")
            raise

    return make


CALL_TIMEOUT = 3600.0
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


AWAY = (
    "this node tries until it does (is it up, and this machine's network? `flwr-distill doctor` "
    "finds out)"
)


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
        limit_calls(invoker, CALL_TIMEOUT)
        let_polls_wait(invoker, pace())
        return invoker

    def connect_together(*arguments: Any, **named: Any) -> Any:
        bound = parameters.bind(*arguments, **named).arguments
        keys = bound.get("authentication_keys")
        outage = Outage(f"The SuperLink at {bound['server_address']}", AWAY)
        watch_heartbeats(bound["retry_invoker"], outage)
        stub = partial(BatchingStub, key=keys[0] if keys else None, refused=refused)
        return connect(*arguments, adapter_cls=stub, **named)

    setattr(loop, make_name, make_invoker)
    setattr(loop, connect_name, connect_together)
    return True


def _is_busy(error: grpc.RpcError) -> bool:
    return error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED or overloaded(error)


def watch_heartbeats(invoker: RetryInvoker, outage: Outage) -> None:
    """Report to an outage what an invoker's calls find, and its heartbeats, which are not retried.

    Where a network swallows packets, a heartbeat is the only call that soon has no answer.
    """
    outage.watch(invoker)
    invoke = invoker.invoke

    def invoke_watched(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        request = args[0] if args else kwargs.get("request")
        try:
            return invoke(target, *args, **kwargs)
        except grpc.RpcError:
            if isinstance(request, SendNodeHeartbeatRequest):
                outage.begin()
            raise

    invoker.invoke = invoke_watched  # type: ignore[method-assign]


def let_polls_wait(invoker: RetryInvoker, pace: Pace) -> None:
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
