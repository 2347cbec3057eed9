"""Bytes that a run sends, by round, phase and link, measured from the records themselves."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from flwr.app import ConfigRecord, Message, RecordDict

from protocol.messages import PARCEL

DOWN = "server->node"
UP = "node->server"
RELAYED = "member->head, relayed"
DIRECT = "member->head, direct"


@dataclass
class Ledger:
    """Book of bytes by (phase, link).

    A phase is a message type (``train``, ``query.label_knowledge`` ...). Parcels that nodes send
    each other through the server count on the server's links, up and down, and once more as
    ``member->head, relayed``: what that link would carry by itself. Of those that go directly, only
    the receipts pass the server; what went is booked as ``member->head, direct``.
    """

    entries: Counter[tuple[str, str]] = field(default_factory=Counter)
    payloads: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Of the entries on the server's links, arrays and sealed parcels: what is left without the
    control messages (settings, routes, receipts, metrics) that every node gets and sends."""

    def book_sent(self, messages: list[Message]) -> None:
        """Book messages from the server to nodes."""
        sizes: dict[int, tuple[int, int]] = {}  # messages of a phase often share one record
        for message in messages:
            content = message.content
            if id(content) not in sizes:
                sizes[id(content)] = content_bytes(content), payload_bytes(content)
            size, payload = sizes[id(content)]
            self.entries[message.metadata.message_type, DOWN] += size
            self.payloads[message.metadata.message_type, DOWN] += payload

    def book_received(self, phase: str, replies: list[Message]) -> None:
        """Book replies from nodes to the server; error replies carry no records."""
        for reply in replies:
            if reply.has_content():
                self.entries[phase, UP] += content_bytes(reply.content)
                self.payloads[phase, UP] += payload_bytes(reply.content)
                for name, record in reply.content.config_records.items():
                    if name.partition(".")[0] == PARCEL:
                        link, size = _parcel_bytes(record)
                        self.entries[phase, link] += size

    def total(self, *links: str) -> int:
        """Bytes on these links over all phases."""
        return sum(size for (_, link), size in self.entries.items() if link in links)

    @property
    def server_bytes(self) -> int:
        """All bytes of records through the server, both ways."""
        return self.total(DOWN, UP)

    @property
    def link_bytes(self) -> int:
        """Bytes that nodes sent to each other."""
        return self.total(RELAYED, DIRECT)

    def by_phase(self) -> dict[str, dict[str, int]]:
        """Bytes as ``{phase: {link: bytes}}``."""
        return _by_phase(self.entries)

    def payloads_by_phase(self) -> dict[str, dict[str, int]]:
        """Bytes of arrays and parcels through the server, as ``{phase: {link: bytes}}``."""
        return _by_phase(self.payloads)

    def state_dict(self) -> dict[str, dict[str, dict[str, int]]]:
        """All that is booked, for a checkpoint."""
        return {"entries": self.by_phase(), "payloads": self.payloads_by_phase()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Mapping[str, int]]]) -> None:
        """Add what was booked in an earlier run, as `state_dict` gave it."""
        for book, table in ((self.entries, state["entries"]), (self.payloads, state["payloads"])):
            for phase, sizes in table.items():
                for link, size in sizes.items():
                    book[phase, link] += size


def content_bytes(content: RecordDict) -> int:
    """Bytes of a message's records: array data, metric and config values, and their keys."""
    return sum(
        _config_bytes(record) if isinstance(record, ConfigRecord) else record.count_bytes()
        for record in content.values()
    )


def payload_bytes(content: RecordDict) -> int:
    """Bytes of a message's arrays and of the sealed parcels that ride in it."""
    arrays = sum(record.count_bytes() for record in content.array_records.values())
    payloads = (record.get("payload") for record in content.config_records.values())
    return arrays + sum(len(payload) for payload in payloads if isinstance(payload, bytes))


def _by_phase(sizes: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    table: dict[str, dict[str, int]] = {}
    for (phase, link), size in sizes.items():
        table.setdefault(phase, {})[link] = size
    return table


def _parcel_bytes(record: ConfigRecord) -> tuple[str, int]:
    """Link that a parcel took, and its bytes there; a receipt says how many went directly."""
    size = record.get("num-bytes")
    if record.get("link") == "direct" and isinstance(size, int):
        return DIRECT, max(size, 0)
    return RELAYED, _config_bytes(record)


def _config_bytes(record: ConfigRecord) -> int:
    """Like Flower's own count, which refuses an empty string."""
    total = 0
    for key, value in record.items():
        total += len(key)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str | bytes):
                total += len(item)
            else:
                total += 1 if isinstance(item, bool) else 8
    return total
