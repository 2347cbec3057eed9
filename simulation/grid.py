"""Flower's Grid over virtual nodes on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, Protocol

from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid

from flwr_distill.protocol.arrays import decode

Node = Callable[[Message], RecordDict | None]


class Pool(Protocol):
    """What answers the messages to virtual nodes."""

    def submit(self, messages: Sequence[Message]) -> None:
        """Queue messages."""

    def wait(self, seconds: float) -> list[tuple[str, RecordDict | Error]]:
        """Wait for replies; return them by message id, as soon as there is one."""


class Functions:
    """A pool in this process, where a function answers for each node as soon as it is asked.

    Parameters
    ----------
    nodes : Mapping[int, callable]
        By Flower's node id. They return a reply's content, or None to send none; an exception
        becomes an error reply.
    """

    def __init__(self, nodes: Mapping[int, Node]) -> None:
        self.nodes = nodes
        self._done: list[tuple[str, RecordDict | Error]] = []

    def submit(self, messages: Sequence[Message]) -> None:
        """Run the nodes, one after the other."""
        for message in messages:
            try:
                for record in message.content.array_records.values():
                    decode(record)  # once for all nodes that get it
                answer = self.nodes[message.metadata.dst_node_id](message)
            except Exception as error:  # whatever a node raises is its answer
                self._done.append((message.metadata.message_id, Error(0, str(error))))
            else:
                if answer is not None:
                    self._done.append((message.metadata.message_id, answer))

    def wait(self, seconds: float) -> list[tuple[str, RecordDict | Error]]:
        """Replies so far, at once: there will be no others."""
        done, self._done = self._done, []
        if not done and seconds:
            time.sleep(seconds)
        return done


class SimulationGrid(Grid):
    """A grid whose nodes a pool answers for.

    Parameters
    ----------
    nodes : Collection[int]
        Flower's ids of the virtual nodes.
    pool : Pool
        Answers the messages.
    """

    def __init__(self, nodes: Collection[int], pool: Pool) -> None:
        self._nodes = list(nodes)
        self._pool = pool
        self._ids = count(1)
        self._sent: dict[str, Message] = {}
        self.replies: dict[str, Message] = {}
        """Replies that nobody has pulled yet, by the id of their message."""
        self._run: Any = None

    def set_run(self, run: Any) -> None:
        """Set the run of this grid."""
        self._run = run

    @property
    def run(self) -> Any:
        """Run information."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Deprecated in Flower, but part of its interface."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        """Ids of all nodes."""
        return list(self._nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Give messages to the pool; return their ids."""
        messages = list(messages)
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(next(self._ids))
            self._sent[message.metadata.message_id] = message
        self._pool.submit(messages)
        self.wait(0)
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Replies to these messages that have arrived."""
        self.wait(0)
        return [self.replies.pop(name) for name in message_ids if name in self.replies]

    def wait(self, seconds: float) -> None:
        """Wait until a reply arrives, or the time is over; late replies are dropped."""
        for name, answer in self._pool.wait(seconds):
            message = self._sent.pop(name)
            if time.time() < message.metadata.created_at + message.metadata.ttl:
                self.replies[name] = Message(answer, reply_to=message)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Push messages; return the replies that arrive in time."""
        pending = set(self.push_messages(messages))
        end = None if timeout is None else time.monotonic() + timeout
        replies: list[Message] = []
        while pending and (end is None or time.monotonic() < end):
            arrived = self.pull_messages(pending)
            pending -= {reply.metadata.reply_to_message_id for reply in arrived}
            replies += arrived
            if pending and not arrived:
                self.wait(1.0 if end is None else min(1.0, end - time.monotonic()))
        return replies
