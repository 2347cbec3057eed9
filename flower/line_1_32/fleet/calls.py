"""How a SuperLink serves calls: bound to the node that makes them, waiting, and in batches.

Flower compares the key of a call with the node that the request names, and nothing else: neither
the sender of a reply, nor the node whose message or object is meant. It does not compare the call
that activates a node at all.

Flower answers each poll at once, so nodes must poll often, and many idle nodes fill a SuperLink
with polls. A waiting poll costs one call, however long it takes.
"""

# ruff: noqa: D102, N802 (Flower's methods, under Flower's names)

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from logging import WARNING
from typing import TYPE_CHECKING, Any, NoReturn, cast

import grpc
from flwr.common import log
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, PUBLIC_KEY_HEADER
from flwr.proto.message_pb2 import (
    ObjectTree,
    PullObjectRequest,
    PullObjectResponse,
    PushObjectRequest,
)
from flwr.server.superlink.fleet.grpc_rere.fleet_servicer import FleetServicer
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.object_store import NoObjectInStoreError
from flwr.supercore.utils import get_metadata_bytes
from google.protobuf.message import DecodeError

from flwr_distill.flower.line_1_32.calls import (
    HEADER,
    MAX_BYTES,
    MAX_CALLS,
    NAMES,
    WAIT,
    packed,
    unpacked,
)

if TYPE_CHECKING:
    from flwr_distill.flower.line_1_32.fleet.linkstate import WatchingLinkState
    from flwr_distill.flower.line_1_32.fleet.store import OneConnectionStore
    from flwr_distill.flower.line_1_32.objects import MemoryObjectStore


MAX_OBJECTS = 2**17
"""Objects that a node announces with a reply: Flower's chunks of 5 MiB make 600 GiB of them."""
MAX_CACHED = 2**21
"""Objects of which it is cached which node may pull them."""


@dataclass(frozen=True)
class _Fetched:
    """Messages that a node fetched last, and their objects."""

    messages: frozenset[str] = frozenset()
    objects: frozenset[str] = frozenset()


_NOTHING = _Fetched()


class BoundServicer(FleetServicer):
    """Flower's Fleet API, in which a node reaches its own messages, objects and replies only.

    Flower's interceptor has already compared a call's key with the node of its request, also where
    nodes register themselves. The SuperLink's state records what a node fetched, its object store
    what a node announced; both survive a restart.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._fetched_lock = threading.Lock()
        self._fetched: OrderedDict[int, _Fetched] = OrderedDict()
        self._cached = 0
        self._pushing = threading.Lock()

    def ActivateNode(self, request: Any, context: grpc.ServicerContext) -> Any:
        key = get_metadata_bytes(context.invocation_metadata(), PUBLIC_KEY_HEADER)
        if key and key != request.public_key:
            _refuse(context, "a call activates the node of another key than its own")
        return super().ActivateNode(request, context)

    def PullMessages(self, request: Any, context: grpc.ServicerContext) -> Any:
        response = super().PullMessages(request, context)
        self._cache(request.node.node_id, response.message_object_trees)
        return response

    def PushMessages(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Accept a node's reply to its own message; of a late reply register nothing."""
        node = request.node.node_id
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            _refuse(context, f"node {node} must push one reply, with its objects")
        reply, tree = request.messages_list[0].metadata, request.message_object_trees[0]
        if reply.src_node_id != node:
            _refuse(context, f"node {node} replies in the name of node {reply.src_node_id}")
        if reply.message_id != tree.object_id:
            _refuse(context, f"node {node} replies with the objects of another message")
        if not self._was_sent(reply.reply_to_message_id, node, reply.run_id):
            _refuse(context, f"node {node} replies to a message that was not sent to it")
        if any(islice(iterate_object_tree(tree), MAX_OBJECTS, None)):
            _refuse(context, f"node {node} announces more than {MAX_OBJECTS} objects")
        store = self._store
        with self._state.transaction(), self._pushing:  # in memory, transactions do nothing
            announcer = store.announcer(tree.object_id)
            if announcer not in (None, node):
                _refuse(context, f"node {node} announces the objects of another message")
            try:
                response = super().PushMessages(request, context)
            except ValueError as error:
                _refuse(context, f"node {node}: {error}")
            if announcer is None and str(None) in response.results:
                store.delete(tree.object_id)
                del response.objects_to_push[:]
            elif announcer is None:
                store.assign(tree.object_id, node)
        return response

    def PushObject(self, request: Any, context: grpc.ServicerContext) -> Any:
        node, name, store = request.node.node_id, request.object_id, self._store
        if not store.is_announced(name, node) and name in store:
            _refuse(context, f"node {node} pushes an object that it has not announced")
        return super().PushObject(request, context)  # refuses objects that nobody announced

    def PullObject(self, request: Any, context: grpc.ServicerContext) -> Any:
        node = request.node.node_id
        if request.object_id not in self._of(node).objects:
            self._cache(node, self._trees_for(node))
            if request.object_id not in self._of(node).objects:
                _refuse(context, f"node {node} pulls an object that was not sent to it")
        return super().PullObject(request, context)

    def ConfirmMessageReceived(self, request: Any, context: grpc.ServicerContext) -> Any:
        node = request.node.node_id
        if not self._was_sent(request.message_object_id, node, request.run_id):
            _refuse(context, f"node {node} confirms a message that was not sent to it")
        return super().ConfirmMessageReceived(request, context)

    @property
    def _state(self) -> WatchingLinkState:
        return cast("WatchingLinkState", self.state_factory.state())

    @property
    def _store(self) -> OneConnectionStore | MemoryObjectStore:
        return cast("OneConnectionStore | MemoryObjectStore", self.objectstore_factory.store())

    def _of(self, node: int) -> _Fetched:
        with self._fetched_lock:
            return self._fetched.get(node, _NOTHING)

    def _was_sent(self, message_id: str, node: int, run_id: int) -> bool:
        """Whether a message of a run was sent to a node; it may be deleted since."""
        if (sent := self._state.sent(message_id)) is not None:
            return sent == (node, run_id)
        return message_id in self._of(node).messages

    def _cache(self, node: int, trees: Sequence[ObjectTree]) -> None:
        """Cache the objects of the messages that a node fetched last; evict those of others."""
        if not trees:
            return
        messages = frozenset(tree.object_id for tree in trees)
        objects = frozenset(part.object_id for t in trees for part in iterate_object_tree(t))
        with self._fetched_lock:
            self._cached -= len(self._fetched.pop(node, _NOTHING).objects)
            self._fetched[node] = _Fetched(messages, objects)
            self._cached += len(objects)
            while self._cached > MAX_CACHED and len(self._fetched) > 1:
                self._cached -= len(self._fetched.popitem(last=False)[1].objects)

    def _trees_for(self, node: int) -> list[ObjectTree]:
        """Objects of the messages that a node has fetched, and neither confirmed nor answered."""
        trees = []
        for metadata in self._state.fetched(node):
            with suppress(NoObjectInStoreError):
                trees.append(self._store.get_object_tree(metadata.message_id))
        return trees


def _refuse(context: grpc.ServicerContext, reason: str) -> NoReturn:
    log(WARNING, "Refused: %s", reason)
    context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)
    raise AssertionError("abort raises")


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


class BatchedCalls(grpc.ServerInterceptor):
    """Serves batches of calls; comes after the interceptors that admit the caller.

    Each call goes through Flower's own handler, with all its checks, in the name of the node that
    sends the batch. They are stored together or, if one is refused, not at all.

    `add` adds Flower's servicer of the API to a server. `transaction` opens a transaction, in which
    the handlers of a batch read and write.
    """

    def __init__(
        self,
        servicer: Any,
        add: Callable[[Any, Any], None],
        transaction: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        handlers = _Handlers()
        add(servicer, handlers)
        self._handlers = handlers.by_name
        self._transaction = transaction

    def intercept_service(
        self,
        continuation: Callable[[Any], Any],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Answer calls with the header in place of Flower."""
        handler = continuation(handler_call_details)
        if HEADER not in [tuple(each) for each in handler_call_details.invocation_metadata]:
            return handler
        _, _, name = handler_call_details.method.rpartition("/")
        if name == "PullObject":
            return _handler(_accept, PullObjectRequest)
        return _handler(self._make, PushObjectRequest) if name == "PushObject" else handler

    def _make(self, request: Any, context: grpc.ServicerContext) -> PullObjectResponse:
        try:
            parts = unpacked(request.object_content, 2 * MAX_CALLS)
        except ValueError as error:
            _reject(context, str(error))
        if len(parts) % 2:
            _reject(context, "a call in the batch has no content")
        calls = zip(parts[::2], parts[1::2], strict=True)
        answers: list[bytes] = []
        left = MAX_BYTES
        with self._transaction():
            for name, content in calls:
                answers.append(self._answer(name, content, request.node.node_id, context))
                left -= len(answers[-1])
                if left < 0:
                    break
        return PullObjectResponse(object_found=True, object_content=packed(answers))

    def _answer(
        self, name: bytes, content: bytes, node_id: int, context: grpc.ServicerContext
    ) -> bytes:
        handler = self._handlers.get(name.decode("ascii", "replace"))
        if handler is None:
            _reject(context, "a call in the batch is of another kind")
        try:
            request = handler.request_deserializer(content)
        except DecodeError:
            _reject(context, "a call in the batch cannot be read")
        if hasattr(request, "node") and request.node.node_id != node_id:
            _reject(context, "a call in the batch is another node's")
        try:
            answer = handler.unary_unary(request, context)
        except (KeyError, ValueError) as error:
            _reject(context, f"Flower refuses a call in the batch: {type(error).__name__}")
        written: bytes = handler.response_serializer(answer)
        return written


class _Handlers:
    """Stands in for a server, to collect its handlers of calls that can be in a batch."""

    def __init__(self) -> None:
        self.by_name: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Do nothing: the registered ones are the same."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """Collect the handlers of a service."""
        self.by_name |= {name: handlers[name] for name in NAMES}


def _handler(answer: Callable[..., Any], kind: Any) -> grpc.RpcMethodHandler:
    return grpc.unary_unary_rpc_method_handler(
        answer,
        request_deserializer=kind.FromString,
        response_serializer=PullObjectResponse.SerializeToString,
    )


def _accept(request: PullObjectRequest, context: grpc.ServicerContext) -> PullObjectResponse:
    return PullObjectResponse(object_found=True)


def _reject(context: grpc.ServicerContext, reason: str) -> NoReturn:
    context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)
    raise AssertionError("abort raises")
