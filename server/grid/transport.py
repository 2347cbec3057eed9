"""Sends a phase's messages and polls for the replies, until a deadline."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from flwr_distill.protocol.arrays import Arrays
from flwr_distill.protocol.edge import SHARE
from flwr_distill.protocol.messages import ROUTE
from flwr_distill.protocol.replies import set_aside
from flwr_distill.server.grid.exchange import exchange_over
from flwr_distill.server.grid.failures import Failures
from flwr_distill.server.grid.ids import make_id_random
from flwr_distill.server.grid.inbox import Most
from flwr_distill.server.grid.ledger import Ledger, content_bytes, num_parts
from flwr_distill.server.grid.progress import Progress
from flwr_distill.server.grid.spool import Spool
from flwr_distill.server.grid.together import name_companions

FIRST_POLL = 0.02
LONGEST_POLL = 0.5
SOON = 0.05
"""Longest poll while a reply is on its way."""
ROOM = 2**26
"""Bytes that any reply may have."""
PARTS = 1000
"""Records, and arrays in them, that any reply may have."""
MODELS = 4
"""Bytes and parts that a reply may have besides, in units of what it answers."""
LEAST_WAIT = 1.0
"""Seconds that a phase may take in any case."""

Accept = Callable[[Message, Message], Message]
"""Checks a reply to a message as it arrives; gives it, or an error reply in its place."""


@dataclass(frozen=True)
class Received:
    """What came of a phase's messages before the deadline.

    Parameters
    ----------
    messages : list[Message]
        What was sent.
    replies : list[Message]
        In the order in which they arrived.
    seconds : float
        How long it took.
    wait : float
        How long it might have taken.
    """

    messages: list[Message]
    replies: list[Message]
    seconds: float
    wait: float

    @property
    def phase(self) -> str:
        """Message type."""
        return self.messages[0].metadata.message_type


class Transport:
    """Sends messages over Flower's grid and keeps their replies.

    Parameters
    ----------
    grid : Grid
        Flower's own grid, of a deployment or a simulation.
    deadline : float
        Seconds after which a phase ends without the nodes that have not replied.
    failures : Failures, optional (default: None)
        Where replies are reported that another node sent.
    names : Mapping[int, str], optional (default: None)
        Names of nodes by id, for the log; may grow meanwhile.
    model : Mapping[str, ndarray], optional (default: None)
        A model of the run, for which replies have room whatever they answer.
    """

    def __init__(
        self,
        grid: Grid,
        deadline: float,
        failures: Failures | None = None,
        names: Mapping[int, str] | None = None,
        model: Arrays | None = None,
    ) -> None:
        self.grid = grid
        self.deadline = deadline
        self.failures = failures or Failures()
        self.ledger = Ledger()
        self.together: Mapping[int, int] = {}
        """Partition of each virtual node that trains together with others."""
        self.due = math.inf
        """When an edge owes its answer above, in monotonic seconds: phases end well before it."""
        self._exchange = exchange_over(grid)
        self._names: Mapping[int, str] = {} if names is None else names
        self._model = model or {}

    def push(self, messages: Sequence[Message]) -> list[str]:
        """Push messages with ids that nobody can guess, and count their bytes."""
        for message in messages:
            make_id_random(message)
        self.ledger.book_sent(messages)
        return self._exchange.push(messages)

    def receive(
        self, messages: list[Message], timeout: float | None, title: str, accept: Accept
    ) -> Received:
        """Push messages, and check and count replies as they arrive, until the deadline.

        Parameters
        ----------
        messages : list[Message]
            Of one phase.
        timeout : float or None
            Seconds to wait, if shorter than the deadline.
        title : str
            Name of the phase in the log.
        accept : Accept
            Checks each reply.
        """
        wait = min(self.deadline, math.inf if timeout is None else timeout)
        wait = min(wait, max(LEAST_WAIT, SHARE * (self.due - time.monotonic())))
        for message in messages:
            message.metadata.ttl = min(message.metadata.ttl, wait)
        if messages[0].metadata.message_type == MessageType.TRAIN:
            name_companions(messages, self.together)
        self._exchange.prepare(messages)
        start = time.monotonic()
        pending = dict(zip(self.push(messages), messages, strict=True))
        pending.pop("", None)  # messages that the SuperLink refused have no id
        replies, spool = [], Spool()
        by_node = {message.metadata.dst_node_id: message for message in messages}
        progress = Progress(title, len(messages), self._names)
        for arrived in self._arriving(pending, start + wait, progress):
            self.ledger.book_received(arrived)
            reply = accept(by_node[arrived.metadata.src_node_id], arrived)
            if reply.has_content():
                self.ledger.book_parcels(reply)
                spool.keep(reply.content)
            replies.append(reply)
        return Received(messages, replies, time.monotonic() - start, wait)

    def _arriving(
        self, messages: Mapping[str, Message], end: float, progress: Progress
    ) -> Iterator[Message]:
        """Replies as they arrive, until all are in or it is `end`, in monotonic seconds."""
        inbox, poll = self._exchange.open_inbox(messages, self._most), FIRST_POLL
        while inbox.waiting and time.monotonic() < end:
            poll = min(poll * 1.5, SOON if inbox.coming else LONGEST_POLL)
            for reply in inbox.fetch(end):
                poll = FIRST_POLL
                yield reply
            for message, reason in inbox.rejected:
                sent = message.metadata
                set_aside(self.failures, sent.dst_node_id, sent.message_type, reason, "transport")
            inbox.rejected.clear()
            progress.show(messages[waiting].metadata.dst_node_id for waiting in inbox.waiting)
            if inbox.waiting:
                inbox.wait(poll)
        inbox.close()

    def _most(self, message: Message) -> Most:
        """The most in a reply to a message, whether or not the message carries the model."""
        routes = (
            record.get("largest", 0)
            for name, record in message.content.config_records.items()
            if name.partition(".")[0] == ROUTE
        )
        parcels = sum(size for size in routes if isinstance(size, int))
        model = sum(array.nbytes for array in self._model.values())
        return Most(
            ROOM + MODELS * (content_bytes(message.content) + model) + parcels,
            PARTS + MODELS * (num_parts(message.content) + len(self._model)),
        )
