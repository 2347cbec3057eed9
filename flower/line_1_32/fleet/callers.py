"""Binds every call of the Fleet API to the node that makes it.

Flower compares the key of a call with the node that the request names, and nothing else: neither
the sender of a reply, nor the node whose message or object is meant. It does not compare the call
that activates a node at all.
"""

# ruff: noqa: D102, N802 (Flower's methods, under Flower's names)

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from logging import WARNING
from typing import TYPE_CHECKING, Any, NoReturn, cast

import grpc
from flwr.common import log
from flwr.common.constant import PUBLIC_KEY_HEADER
from flwr.proto.message_pb2 import ObjectTree
from flwr.server.superlink.fleet.grpc_rere.fleet_servicer import FleetServicer
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.object_store import NoObjectInStoreError
from flwr.supercore.utils import get_metadata_bytes

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
