"""Sends a phase's messages in groups, so that an announced message is complete."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.appio_pb2 import PushAppMessagesRequest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.supercore.inflatable.inflatable_object import (
    InflatableObject,
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import ObjectIdNotPreregisteredError, push_objects
from flwr.superlink.grid import GrpcGrid

from flwr_distill.flower.line_1_32.calls import MAX_BYTES, Batches

BATCH = 16
"""Messages that are announced before, or with, their objects."""
SMALL = MAX_BYTES // 2
"""Bytes of objects that are sent with their messages."""
AT_A_TIME = 16
"""Large objects that are encoded and pushed side by side: Flower would encode all of them first."""


class Calls:
    """Makes calls over the connection of Flower's grid, in batches where possible."""

    def __init__(self, grid: GrpcGrid) -> None:
        self.grid = grid

    @cached_property
    def _batches(self) -> Batches:
        stub = self.grid._stub  # connects
        invoke = self.grid._retry_invoker.invoke
        return Batches(stub, self.grid._channel, "ServerAppIo", invoke)

    def are_taken_together(self) -> bool:
        """Whether the SuperLink accepts batches."""
        return self._batches.taken(self.grid.node, self.grid.run.run_id)

    def make(self, requests: Sequence[Any]) -> list[Any]:
        """Make calls as `Batches.make`."""
        return self._batches.make(self.grid.node, self.grid.run.run_id, requests)

    def make_all(self, requests: Sequence[Any]) -> list[Any]:
        """Make calls as `Batches.make_all`."""
        return self._batches.make_all(self.grid.node, self.grid.run.run_id, requests)


def push(calls: Calls, messages: Sequence[Message]) -> list[str]:
    """Push messages to a SuperLink; return their ids.

    A SuperLink stores equal objects once, but shows a message to its node before it has them, and
    the node polls for them. So the first message is sent alone, with the objects that the others
    share, and then a few at a time; where the SuperLink accepts batches, with their objects.
    """
    if not calls.are_taken_together():
        return [name for batch in batches(messages) for name in calls.grid.push_messages(batch)]
    sent: set[str] = set()
    with no_object_id_recompute():
        return [name for batch in batches(messages) for name in _push(calls, batch, sent)]


def batches(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """Yield the first message alone, then the others by `BATCH`."""
    yield messages[:1]
    for start in range(1, len(messages), BATCH):
        yield messages[start : start + BATCH]


def _push(calls: Calls, messages: Sequence[Message], sent: set[str]) -> Sequence[str]:
    """Push messages with those of their objects that were not sent before, as Flower's grid does.

    Large objects follow, as do those that the SuperLink has lost.
    """
    grid, request = calls.grid, PushAppMessagesRequest()
    objects: dict[str, InflatableObject] = {}
    for message in messages:
        message.metadata.__dict__["_run_id"] = grid.run.run_id
        message.metadata.__dict__["_src_node_id"] = grid.node.node_id
        message.metadata.__dict__["_message_id"] = message.object_id
        request.messages_list.append(message_to_proto(remove_content_from_message(message)))
        request.message_object_trees.append(get_object_tree(message))
        objects |= get_all_nested_objects(message)
    pushes, room = [], SMALL
    for name in objects.keys() - sent:
        content = objects[name].deflate()
        if (room := room - len(content)) < 0:
            break
        pushes.append(
            PushObjectRequest(
                node=grid.node, run_id=grid.run.run_id, object_id=name, object_content=content
            )
        )
    pushed, *stored = calls.make_all([request, *pushes])
    for push, answer in zip(pushes, stored, strict=True):
        if not answer.stored:
            raise ObjectIdNotPreregisteredError(push.object_id)
    push_object = make_push_object_fn_protobuf(grid._stub.PushObject, grid.node, grid.run.run_id)
    left = list(set(pushed.objects_to_push) - {push.object_id for push in pushes})
    for start in range(0, len(left), AT_A_TIME):
        push_objects({name: objects[name] for name in left[start : start + AT_A_TIME]}, push_object)
    sent.update(objects)
    return list(pushed.message_ids)
