"""Counts the bytes that a run sends, by phase and link, from the records themselves."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from flwr_distill.protocol.arrays import num_bytes
from flwr_distill.protocol.messages import PARCEL

DOWN = "server->node"
UP = "node->server"
RELAYED = "member->head, relayed"
DIRECT = "member->head, direct"


@dataclass
class Ledger:
    """Bytes by (phase, link); a phase is a message type such as ``train``.

    Parcels relayed between nodes count on the server's links, up and down, and once more as
    ``member->head, relayed``: the bytes of that link alone. For parcels sent directly, only
    receipts pass the server; the parcels themselves count as ``member->head, direct``.
    """

    entries: Counter[tuple[str, str]] = field(default_factory=Counter)
    payloads: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Arrays and sealed parcels on the server's links: no settings, routes, receipts, metrics."""

    def book_sent(self, messages: Sequence[Message]) -> None:
        """Count messages from the server to nodes."""
        sizes: dict[int, tuple[int, int]] = {}  # by record: messages of a phase often share one
        for message in messages:
            content = message.content
            if id(content) not in sizes:
                sizes[id(content)] = content_bytes(content), payload_bytes(content)
            size, payload = sizes[id(content)]
            self.entries[message.metadata.message_type, DOWN] += size
            self.payloads[message.metadata.message_type, DOWN] += payload

    def book_received(self, reply: Message) -> None:
        """Count a reply, before its arrays are decoded."""
        if reply.has_content():  # error replies carry no records
            phase = reply.metadata.message_type
            self.entries[phase, UP] += content_bytes(reply.content)
            self.payloads[phase, UP] += payload_bytes(reply.content)

    def book_parcels(self, reply: Message) -> None:
        """Count the parcels of a checked reply by the sizes that it claims."""
        phase = reply.metadata.message_type
        for name, record in reply.content.config_records.items():
            if name.partition(".")[0] == PARCEL:
                link, size = _parcel_bytes(record)
                self.entries[phase, link] += size

    def total(self, *links: str) -> int:
        """Bytes on these links over all phases."""
        return sum(size for (_, link), size in self.entries.items() if link in links)

    @property
    def server_bytes(self) -> int:
        """Bytes of all records through the server, both ways."""
        return self.total(DOWN, UP)

    @property
    def link_bytes(self) -> int:
        """Bytes sent between nodes."""
        return self.total(RELAYED, DIRECT)

    def by_phase(self) -> dict[str, dict[str, int]]:
        """Bytes as ``{phase: {link: bytes}}``."""
        return _nested(self.entries)

    def payloads_by_phase(self) -> dict[str, dict[str, int]]:
        """Bytes of arrays and parcels through the server, as ``{phase: {link: bytes}}``."""
        return _nested(self.payloads)

    def state_dict(self) -> dict[str, dict[str, dict[str, int]]]:
        """All counts, for a checkpoint."""
        return {"entries": self.by_phase(), "payloads": self.payloads_by_phase()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Mapping[str, int]]]) -> None:
        """Add the counts of a checkpoint."""
        for counter, key in ((self.entries, "entries"), (self.payloads, "payloads")):
            for phase, sizes in state[key].items():
                for link, size in sizes.items():
                    counter[phase, link] += size


def content_bytes(content: RecordDict) -> int:
    """Bytes of a message's records: array data, metric and config values, and their keys."""
    return sum(map(_record_bytes, content.values()))


def num_parts(content: RecordDict) -> int:
    """Records of a message, and arrays in them."""
    return len(content) + sum(map(len, content.array_records.values()))


def payload_bytes(content: RecordDict) -> int:
    """Bytes of a message's arrays and sealed parcels."""
    arrays = sum(map(num_bytes, content.array_records.values()))
    payloads = (record.get("payload") for record in content.config_records.values())
    return arrays + sum(len(payload) for payload in payloads if isinstance(payload, bytes))


def _record_bytes(record: ArrayRecord | ConfigRecord | MetricRecord) -> int:
    if isinstance(record, ArrayRecord):
        return num_bytes(record)
    return _config_bytes(record) if isinstance(record, ConfigRecord) else record.count_bytes()


def _nested(sizes: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    table: dict[str, dict[str, int]] = {}
    for (phase, link), size in sizes.items():
        table.setdefault(phase, {})[link] = size
    return table


def _parcel_bytes(record: ConfigRecord) -> tuple[str, int]:
    """A parcel's link and its bytes there; for direct parcels, from the receipt."""
    size = record.get("num-bytes")
    if record.get("link") == "direct" and isinstance(size, int):
        return DIRECT, max(size, 0)
    return RELAYED, _config_bytes(record)


def _config_bytes(record: ConfigRecord) -> int:
    """Same as Flower's count, which raises on an empty string."""
    total = 0
    for key, value in record.items():
        total += len(key)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str | bytes):
                total += len(item)
            else:
                total += 1 if isinstance(item, bool) else 8
    return total
