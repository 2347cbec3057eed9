"""Train messages of a simulation: which virtual nodes may train together."""

import secrets
from collections import defaultdict
from collections.abc import Iterable, Mapping

from flwr.app import ConfigRecord, Message

from flwr_distill.protocol.messages import BATCH, PARTITIONS, TOGETHER


def name_companions(messages: Iterable[Message], partitions: Mapping[int, int]) -> None:
    """Write into each message which nodes get the same one, by partition, and a number of theirs.

    `messages`: of one phase. Those with the very same records are taken for the same. `partitions`:
    partition of each virtual node that asks for it, by node id; others' messages stay.
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
