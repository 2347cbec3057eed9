"""Binds every call of the Fleet API to the node that makes it.

Flower compares the key of a call with the node that the request names, and nothing further: not
with the sender of a reply, nor with the node whose message or object is meant. Its call that
activates a node is not compared at all.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from logging import WARNING
from typing import TYPE_CHECKING, Any, NoReturn, cast

import grpc
from flwr.common import log
from flwr.common.constant import PUBLIC_KEY_HEADER
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    PushMessagesResponse,
)
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ConfirmMessageReceivedResponse,
    ObjectTree,
    PullObjectRequest,
    PullObjectResponse,
    PushObjectRequest,
    PushObjectResponse,
)
from flwr.server.superlink.fleet.grpc_adapter.grpc_adapter_servicer import GrpcAdapterServicer
from flwr.server.superlink.fleet.grpc_rere.fleet_servicer import FleetServicer
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.object_store import NoObjectInStoreError
from flwr.supercore.utils import get_metadata_bytes

if TYPE_CHECKING:
    from fleet.flower_1_32.linkstate import WatchingLinkState


@dataclass(frozen=True)
class _Rights:
    """What a node may read and write, besides the state that a restart leaves.

    Attributes
    ----------
    messages : frozenset[str]
        Messages that it fetched last.
    to_pull : frozenset[str]
        Objects of these.
    to_push : frozenset[str]
        Objects of the reply that it announced last.
    """

    messages: frozenset[str] = frozenset()
    to_pull: frozenset[str] = frozenset()
    to_push: frozenset[str] = frozenset()


_NONE = _Rights()


class BoundServicer(FleetServicer):
    """Flower's Fleet API, in which a node reaches its own messages, objects and replies only.

    Flower's interceptor has compared the key of a call with the node of its request before, also
    where nodes register themselves. A SuperLink that has restarted learns from its state which
    messages nodes have fetched. It then knows of no announced reply; but what an object holds is
    fixed by its id, a hash, whichever node sends it.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._rights_lock = threading.Lock()
        self._rights: dict[int, _Rights] = {}

    def ActivateNode(  # noqa: N802 (Flower\'s name)
        self, request: ActivateNodeRequest, context: grpc.ServicerContext
    ) -> ActivateNodeResponse:
        """Activate the node whose key has signed the call."""
        key = get_metadata_bytes(context.invocation_metadata(), PUBLIC_KEY_HEADER)
        if key and key != request.public_key:
            _refuse(context, "a call activates the node of another key than its own")
        return super().ActivateNode(request, context)

    def PullMessages(  # noqa: N802 (Flower\'s name)
        self, request: PullMessagesRequest, context: grpc.ServicerContext
    ) -> PullMessagesResponse:
        """Give a node its message, and the right to pull the message's objects."""
        response = super().PullMessages(request, context)
        if response.messages_list:
            self._let_pull(request.node.node_id, response.message_object_trees)
        return response

    def PushMessages(  # noqa: N802 (Flower\'s name)
        self, request: PushMessagesRequest, context: grpc.ServicerContext
    ) -> PushMessagesResponse:
        """Take a node's reply to a message that was sent to this node."""
        node = request.node.node_id
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            _refuse(context, f"node {node} must push one reply, with its objects")
        reply, tree = request.messages_list[0].metadata, request.message_object_trees[0]
        if reply.src_node_id != node:
            _refuse(context, f"node {node} replies in the name of node {reply.src_node_id}")
        if reply.message_id != tree.object_id:
            _refuse(context, f"node {node} replies with the objects of another message")
        if not self._was_sent(reply.reply_to_message_id, node):
            _refuse(context, f"node {node} replies to a message that was not sent to it")
        response = super().PushMessages(request, context)
        self._grant(node, to_push=_parts([tree]))
        return response

    def PushObject(  # noqa: N802 (Flower\'s name)
        self, request: PushObjectRequest, context: grpc.ServicerContext
    ) -> PushObjectResponse:
        """Store an object of a node's reply."""
        node, name = request.node.node_id, request.object_id
        if name not in self._of(node).to_push:
            with self._rights_lock:
                others = any(name in rights.to_push for rights in self._rights.values())
            if others:
                _refuse(context, f"node {node} pushes an object of another node's reply")
        return super().PushObject(request, context)

    def PullObject(  # noqa: N802 (Flower\'s name)
        self, request: PullObjectRequest, context: grpc.ServicerContext
    ) -> PullObjectResponse:
        """Give a node an object of a message that was sent to it."""
        node, name = request.node.node_id, request.object_id
        if name not in self._of(node).to_pull:
            if trees := self._trees_for(node):
                self._let_pull(node, trees)
            if name not in self._of(node).to_pull:
                _refuse(context, f"node {node} pulls an object that was not sent to it")
        return super().PullObject(request, context)

    def ConfirmMessageReceived(  # noqa: N802 (Flower\'s name)
        self, request: ConfirmMessageReceivedRequest, context: grpc.ServicerContext
    ) -> ConfirmMessageReceivedResponse:
        """Drop a message that its node has received."""
        node = request.node.node_id
        if not self._was_sent(request.message_object_id, node):
            _refuse(context, f"node {node} confirms a message that was not sent to it")
        return super().ConfirmMessageReceived(request, context)

    @property
    def _state(self) -> WatchingLinkState:
        return cast("WatchingLinkState", self.state_factory.state())

    def _of(self, node: int) -> _Rights:
        return self._rights.get(node, _NONE)

    def _grant(self, node: int, **rights: frozenset[str]) -> None:
        with self._rights_lock:
            self._rights[node] = replace(self._of(node), **rights)

    def _was_sent(self, message_id: str, node: int) -> bool:
        """Whether a message was sent to a node."""
        return message_id in self._of(node).messages or self._state.receiver(message_id) == node

    def _let_pull(self, node: int, trees: Sequence[ObjectTree]) -> None:
        """Let a node pull the objects of these messages, and no longer those of earlier ones."""
        messages = frozenset(tree.object_id for tree in trees)
        self._grant(node, messages=messages, to_pull=_parts(trees))

    def _trees_for(self, node: int) -> list[ObjectTree]:
        """Objects of the messages that a node has fetched, and neither confirmed nor answered."""
        trees, store = [], self.objectstore_factory.store()
        for metadata in self._state.fetched(node):
            with suppress(NoObjectInStoreError):
                trees.append(store.get_object_tree(metadata.message_id))
        return trees


class BoundAdapterServicer(BoundServicer, GrpcAdapterServicer):
    """The same API in Flower's adapter, whose calls carry no key: bound to the node they name."""


def _parts(trees: Iterable[ObjectTree]) -> frozenset[str]:
    return frozenset(part.object_id for tree in trees for part in iterate_object_tree(tree))


def _refuse(context: grpc.ServicerContext, reason: str) -> NoReturn:
    log(WARNING, "Refused: %s", reason)
    context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)
    raise AssertionError("abort raises")
