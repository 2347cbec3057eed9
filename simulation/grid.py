"""Flower's Grid over virtual nodes on this machine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any, Protocol

from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid


class Pool(Protocol):
    """What answers the messages to virtual nodes."""

    def submit(self, messages: Sequence[Message]) -> None:
        """Queue messages."""

    def wait(self, seconds: float) -> list[tuple[str, RecordDict | Error]]:
        """Wait for replies; return them by message id, as soon as there is one."""


class SimulationGrid(Grid):
    """A grid whose nodes a pool answers for.

    Parameters
    ----------
    nodes : Sequence[int]
        Flower's ids of the virtual nodes.
    pool : Pool
        Answers the messages.
    """

    def __init__(self, nodes: Sequence[int], pool: Pool) -> None:
        self._nodes = list(nodes)
        self._pool = pool
        self._ids = count(1)
        self._sent: dict[str, Message] = {}
        self._replies: dict[str, Message] = {}
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
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Replies to these messages that have arrived."""
        self.wait(0)
        return [self._replies.pop(name) for name in message_ids if name in self._replies]

    def wait(self, seconds: float) -> None:
        """Wait until a reply arrives, or the time is over."""
        for name, answer in self._pool.wait(seconds):
            if message := self._sent.pop(name, None):
                self._replies[name] = Message(answer, reply_to=message)

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
