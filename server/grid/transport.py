"""Sends a phase's messages and polls for the replies, until a deadline."""

import math
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import ConfigRecord, Error, Message, MessageType
from flwr.serverapp import Grid

from flwr_distill.protocol.arrays import Arrays
from flwr_distill.protocol.edge import SHARE
from flwr_distill.protocol.meeting import one_line
from flwr_distill.protocol.messages import BATCH, PARTITIONS, ROUTE, TOGETHER
from flwr_distill.protocol.replies import UNREADABLE, set_aside
from flwr_distill.server.grid.buffer import Buffer
from flwr_distill.server.grid.codec import ModelCodec
from flwr_distill.server.grid.exchange import exchange_over
from flwr_distill.server.grid.failures import Failures
from flwr_distill.server.grid.inbox import Inbox, Most
from flwr_distill.server.grid.ledger import Ledger, content_bytes, num_parts
from flwr_distill.server.grid.message_lines import log_message
from flwr_distill.server.grid.notices import Notices
from flwr_distill.server.grid.progress import Progress
from flwr_distill.server.grid.spool import Spool
from flwr_distill.server.record.phase_file import PhaseFile

FIRST_POLL = 0.02
MAX_POLL = 0.5
SOON = 0.05
"""Longest poll while a reply is on its way."""
ROOM = 2**26
"""Bytes that any reply may have."""
PARTS = 1000
"""Records, and arrays in them, that any reply may have."""
MODELS = 4
"""Bytes and parts that a reply may have besides, in units of what it answers."""
MIN_WAIT = 1.0
"""Seconds that a phase may take in any case."""
RANDOM_BYTES = 16
"""Random bytes in a message's id."""
_NONCE = re.compile(rf"#[0-9a-f]{{{2 * RANDOM_BYTES}}}$")

Accept = Callable[[Message, Message], Message]
"""Checks a reply to a message as it arrives; gives it, or an error reply in its place."""


@dataclass(frozen=True)
class Received:
    """The replies to a phase's messages before the deadline."""

    messages: list[Message]  # sent
    replies: list[Message]  # as they arrived
    seconds: float  # how long it took
    wait: float  # how long it might have taken
    phase: str  # message type


@dataclass
class Transport:
    """Sends messages over Flower's grid and keeps their replies."""

    grid: Grid
    deadline: float  # seconds
    failures: Failures = field(default_factory=Failures)  # gets replies of wrong senders
    names: Mapping[int, str] = field(default_factory=dict)  # by node, for the log; may grow
    model: Arrays = field(default_factory=dict)  # for which any reply has room
    codec: ModelCodec = field(default_factory=ModelCodec)
    phase_file: PhaseFile | None = None  # shows the phase to those who watch the run

    def __post_init__(self) -> None:
        self.ledger = Ledger()
        self.notices = Notices()
        self.idle_since: float | None = None
        """When the last phase ended, in monotonic seconds; None within one."""
        self.together: Mapping[int, int] = {}
        """Partition of each virtual node that trains together with others."""
        self.due = math.inf
        """When an edge owes its answer above, in monotonic seconds: phases end well before it."""
        self._exchange = exchange_over(self.grid)

    def push(self, messages: Sequence[Message]) -> list[str]:
        """Push messages with ids that nobody can guess, and count their bytes."""
        for message in messages:
            make_id_random(message)
        self.ledger.book_sent(messages)
        ids = self._exchange.push(messages)
        for message in messages:
            log_message(message, "sent", self.names)
        return ids

    def receive(
        self, messages: list[Message], timeout: float | None, title: str, accept: Accept
    ) -> Received:
        """Push a phase's messages; check and count replies as they arrive, until the deadline.

        A `timeout` in seconds may shorten the deadline. The log calls the phase by its `title`.
        """
        wait = self._prepare(messages, timeout)
        start = time.monotonic()
        pending = self._pushed(messages)
        inbox = self._exchange.open_inbox(pending, self._most)
        progress = Progress(title, len(messages), self.names, self.phase_file, wait)
        replies = self._collect(inbox, pending, start + wait, progress, accept, math.inf)
        inbox.close()
        phase = messages[0].metadata.message_type
        return Received(messages, replies, time.monotonic() - start, wait, phase)

    def receive_some(
        self,
        messages: list[Message],
        timeout: float | None,
        accept: Accept,
        buffer: Buffer,
    ) -> Received:
        """As `receive`, but end with ``buffer.size`` usable replies, of earlier rounds as well.

        Messages without a reply so far stay in the buffer; what is returned has those with a reply,
        and those whose time is over.
        """
        wait = self._prepare(messages, timeout)
        start = time.monotonic()
        pending = self._pushed(messages) if messages else {}
        if buffer.inbox is None:
            buffer.inbox = self._exchange.open_inbox(pending, self._most)
        else:
            buffer.inbox.add(pending)
        buffer.add(pending, start + wait)
        waiting = {name: one.message for name, one in buffer.pending.items()}
        progress = Progress("nodes train", len(waiting), self.names, self.phase_file, wait)
        replies = self._collect(buffer.inbox, waiting, start + wait, progress, accept, buffer.size)
        answered = [waiting[reply.metadata.reply_to_message_id] for reply in replies]
        expired = [one.message for one in buffer.expire()]
        seconds = time.monotonic() - start
        return Received([*answered, *expired], replies, seconds, wait, MessageType.TRAIN)

    def _prepare(self, messages: list[Message], timeout: float | None) -> float:
        """Complete messages before they are pushed; give the seconds in which replies count."""
        self.idle_since = None
        wait = min(self.deadline, math.inf if timeout is None else timeout)
        wait = min(wait, max(MIN_WAIT, SHARE * (self.due - time.monotonic())))
        for message in messages:
            message.metadata.ttl = min(message.metadata.ttl, wait)
        if messages and messages[0].metadata.message_type == MessageType.TRAIN:
            name_companions(messages, self.together)
        self._exchange.prepare(messages)
        return wait

    def _pushed(self, messages: list[Message]) -> dict[str, Message]:
        with self.codec.coding(messages), self.notices.attached(messages):
            ids = self.push(messages)
        pending = dict(zip(ids, messages, strict=True))
        pending.pop("", None)  # messages that the SuperLink refused have no id
        return pending

    def _collect(
        self,
        inbox: Inbox,
        messages: Mapping[str, Message],
        end: float,
        progress: Progress,
        accept: Accept,
        enough: float,
    ) -> list[Message]:
        """Check and count replies as they arrive, until so many are usable, or it is `end`."""
        replies, spool, usable = list[Message](), Spool(), 0
        by_node = {message.metadata.dst_node_id: message for message in messages.values()}
        for fetched in self._arriving(inbox, messages, end, progress):
            for arrived in fetched:
                self.ledger.book_received(arrived)
                message = by_node[arrived.metadata.src_node_id]
                reply = accept(message, self._decoded(message, arrived))
                self.codec.note(reply, counts=reply.has_content())
                if reply.has_content():
                    usable += 1
                    self.ledger.book_parcels(reply)
                    spool.keep(reply.content)
                replies.append(reply)
            if usable >= enough:
                break
        progress.end()
        self.idle_since = time.monotonic()
        return replies

    def _decoded(self, message: Message, reply: Message) -> Message:
        if reply.has_content():
            try:
                self.codec.decode(message, reply, self._most(message).num_bytes)
            except Exception as error:  # a node may send anything as its model
                reason = f"Its model cannot be decoded: {type(error).__name__}: {error}"
                return Message(Error(UNREADABLE, one_line(reason)), reply_to=message)
        return reply

    def _arriving(
        self, inbox: Inbox, messages: Mapping[str, Message], end: float, progress: Progress
    ) -> Iterator[Iterator[Message]]:
        """Replies as they arrive, until all are in or it is `end`, in monotonic seconds."""
        poll = FIRST_POLL
        while inbox.waiting and time.monotonic() < end:
            poll = min(poll * 1.5, SOON if inbox.coming else MAX_POLL)
            waiting = len(inbox.waiting)
            yield inbox.fetch(end)
            if len(inbox.waiting) < waiting:
                poll = FIRST_POLL
            for message, reason in inbox.rejected:
                sent = message.metadata
                set_aside(self.failures, sent.dst_node_id, sent.message_type, reason, "transport")
            inbox.rejected.clear()
            progress.show(messages[waiting].metadata.dst_node_id for waiting in inbox.waiting)
            if inbox.waiting:
                inbox.wait(poll)

    def _most(self, message: Message) -> Most:
        """The most in a reply to a message, whether or not the message carries the model."""
        routes = (
            record.get("largest", 0)
            for name, record in message.content.config_records.items()
            if name.partition(".")[0] == ROUTE
        )
        parcels = sum(size for size in routes if isinstance(size, int))
        model = sum(array.nbytes for array in self.model.values())
        return Most(
            ROOM + MODELS * (content_bytes(message.content) + model) + parcels,
            PARTS + MODELS * (num_parts(message.content) + len(self.model)),
        )


def make_id_random(message: Message) -> None:
    """Put random bits into a message, before it is pushed.

    A message's id is the hash of its metadata and content. Without these bits any node can compute
    it from its own message, but for another node's id and a time in microseconds. A node that knows
    an id can try to reply to it. The bits follow the group, the only free text in Flower's
    metadata; replies repeat it, so that their ids are as random.
    """
    group = _NONCE.sub("", message.metadata.group_id)
    message.metadata.group_id = f"{group}#{secrets.token_hex(RANDOM_BYTES)}"


def name_companions(messages: Iterable[Message], partitions: Mapping[int, int]) -> None:
    """Write into each message which virtual nodes get the same records, and a number for them.

    `partitions` has those of the nodes that train together; other nodes' messages are unchanged.
    """
    alike: dict[frozenset[tuple[str, int]], list[Message]] = defaultdict(list)
    for message in messages:
        if message.metadata.dst_node_id in partitions:
            records = frozenset((name, id(record)) for name, record in message.content.items())
            alike[records].append(message)
    for group in alike.values():
        companions = sorted({partitions[message.metadata.dst_node_id] for message in group})
        record = ConfigRecord({PARTITIONS: companions, BATCH: secrets.randbits(63)})
        for message in group:
            message.content[TOGETHER] = record
