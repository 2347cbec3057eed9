"""Replies to a phase's messages, fetched as they come in."""

import time
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import cast

from flwr.app import Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.appio_pb2 import PullAppMessagesRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectIdNotPreregisteredError,
    ObjectUnavailableError,
    inflate_object_from_contents,
    pull_objects,
)
from flwr.superlink.grid import GrpcGrid

LOOKS = 64
"""Announced replies looked at in one fetch, so that its cost does not grow with the nodes."""
ROLL_CALL = 5.0
"""Seconds between two looks whether those who send are still connected."""


class Inbox:
    """Replies that a phase waits for, over any Flower Grid.

    Every reply is from the node that the message was sent to, whoever answered for it.

    Parameters
    ----------
    grid : Grid
        Where the messages were pushed.
    asked : Mapping[str, Message]
        The messages by id.

    Attributes
    ----------
    waiting : set[str]
        Ids of the messages without a reply so far.
    """

    def __init__(self, grid: Grid, asked: Mapping[str, Message]) -> None:
        self.waiting = set(asked)
        self._grid = grid
        self._asked = asked

    def fetch(self, end: float) -> Iterator[Message]:
        """Replies that are there by now.

        Parameters
        ----------
        end : float
            When to stop, in the seconds of ``time.monotonic()``.
        """
        for reply in self._grid.pull_messages(set(self.waiting)):
            answer = reply.error if reply.has_error() else reply.content
            yield self._reply(reply.metadata.reply_to_message_id, answer)

    @property
    def coming(self) -> bool:
        """Whether a part of a reply is there, so that it pays to look again soon."""
        return False

    def close(self) -> None:
        """Give up what is still waited for."""

    def _reply(self, message_id: str, answer: RecordDict | Error) -> Message:
        self.waiting.discard(message_id)
        return Message(answer, reply_to=self._asked[message_id])


class SuperLinkInbox(Inbox):
    """Replies that come through a SuperLink, each as soon as it is there as a whole.

    A SuperLink announces a reply before its objects have come. Flower's `pull_messages` waits for
    them one reply after the other, so that a reply whose sender died while sending holds up those
    behind it. This looks for the objects that are sent last; where they are not there, it goes on
    to the next reply. What a reply answers is taken from the SuperLink's word, not the sender's.

    A SuperLink keeps a message that its node never fetched, and with it the model, until the run
    ends. It is told to drop those of nodes that are late or lost.
    """

    _grid: GrpcGrid

    def __init__(self, grid: GrpcGrid, asked: Mapping[str, Message]) -> None:
        super().__init__(grid, asked)
        self._announced: dict[str, ObjectTree] = {}
        """What each reply that is on its way is made of, by the id of the message it answers."""
        self._roll_call = time.monotonic() + ROLL_CALL

    def fetch(self, end: float) -> Iterator[Message]:
        """Replies that are there as a whole by now; see `Inbox`."""
        if unknown := self.waiting - self._announced.keys():
            request = PullAppMessagesRequest(message_ids=unknown)
            found = self._grid._stub.PullMessages(request)
            for reply, tree in zip(found.messages_list, found.message_object_trees, strict=True):
                self._announced[reply.metadata.reply_to_message_id] = tree
        for message_id in list(islice(self._announced, LOOKS)):
            if time.monotonic() >= end:
                return
            tree = self._announced.pop(message_id)
            if (answer := self._pull(tree)) is None:
                self._announced[message_id] = tree  # behind the others
                continue
            if isinstance(answer, Error):  # perhaps the SuperLink's own, for a lost node
                self._drop(message_id)
            yield self._reply(message_id, answer)
        if self._announced and time.monotonic() > self._roll_call:
            self._roll_call = time.monotonic() + ROLL_CALL
            yield from self._broken_off()

    @property
    def coming(self) -> bool:
        """Whether a reply is on its way; see `Inbox`."""
        return bool(self._announced)

    def close(self) -> None:
        """Have the SuperLink drop what is still waited for."""
        for message_id in self.waiting:
            self._drop(message_id)
        for tree in self._announced.values():
            self._drop(tree.object_id)

    def _pull(self, tree: ObjectTree) -> RecordDict | Error | None:
        """Pull a reply; None if it is not there as a whole."""
        parts = [part.object_id for part in iterate_object_tree(tree)]
        pull_object = make_pull_object_fn_protobuf(
            self._grid._stub.PullObject, self._grid.node, self._grid.run.run_id
        )
        try:
            contents = pull_objects(parts[::-1], pull_object, max_tries_per_object=1)
        except ObjectUnavailableError:
            return None
        except ObjectIdNotPreregisteredError as error:
            return _unreadable(error)
        self._drop(tree.object_id)
        try:
            reply = cast(Message, inflate_object_from_contents(tree.object_id, contents))
            return reply.error if reply.has_error() else reply.content
        except Exception as error:  # whatever it is that a node sent
            return _unreadable(error)

    def _broken_off(self) -> Iterator[Message]:
        """Errors of nodes that were lost while they sent."""
        connected = set(self._grid.get_node_ids())
        for message_id, tree in list(self._announced.items()):
            if self._asked[message_id].metadata.dst_node_id not in connected:
                del self._announced[message_id]
                self._drop(tree.object_id)
                reason = "The node was lost while it sent its reply"
                yield self._reply(message_id, Error(ErrorCode.NODE_UNAVAILABLE, reason))

    def _drop(self, object_id: str) -> None:
        """Have the SuperLink drop a message."""
        self._grid._stub.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(
                node=self._grid.node, run_id=self._grid.run.run_id, message_object_id=object_id
            )
        )


def open_inbox(grid: Grid, asked: Mapping[str, Message]) -> Inbox:
    """Open the inbox that fits a grid."""
    return SuperLinkInbox(grid, asked) if isinstance(grid, GrpcGrid) else Inbox(grid, asked)


def _unreadable(error: Exception) -> Error:
    return Error(ErrorCode.REPLY_MESSAGE_UNAVAILABLE, f"Its reply cannot be read: {error}")
