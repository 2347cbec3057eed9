"""Record names and keys of messages that several methods use.

Flower requires the action in a message type to be a Python identifier (underscores); keys in
records follow Flower's own style (``num-examples``).
"""

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")

ARRAYS = "arrays"
CONFIG = "config"
METRICS = "metrics"
NUM_EXAMPLES = "num-examples"
NUM_STEPS = "num-steps"
PARTITION_ID = "partition-id"
PARTITIONS = "partitions"
SERVER_ROUND = "server-round"
TRAIN_ACCURACY = "train-accuracy"
TRAIN_LOSS = "train-loss"

CLIPPING_NORM = "clipping_norm"
"""Key of a train message's config: the longest update that the node may send. Flower's name."""

PARCEL = "parcel"
"""Record with what a node sends to another (``parcel.<rank>`` if there are several)."""

PARCEL_CODEC = "parcel-codec"
"""Record of a message: how the node codes models in parcels (`protocol.parcels.ParcelCoding`)."""

INTRODUCTION = "introduction"
"""Record with what others need to send to a node (:class:`links.records.Introduction`)."""

ROUTE = "route"
"""Record that a node needs to send a parcel (:class:`links.records.Route`)."""

DELIVERY = "delivery"
"""Record with a parcel for its receiver (``delivery.<rank>`` if there are several)."""

LINK_ERROR = "link-error"
"""Config key of a reply: why a parcel could not be sent, if the reply is usable without it."""

REJECTED = "rejected"
"""Metric: parcels that a head rejected. Config key of a leader's reply, ``rejected.<rank>``: why it
rejected a model."""

TOGETHER = "together"
"""Metric of the describe reply: 1 from a virtual node that can train together with others. Record
of a train message to such nodes: the ``partitions`` of all that get the same message."""

SIMULATED = "simulated"
"""Key of the node config: the nodes differ in their partition alone, and take so many devices in
turn. 0 for real nodes."""

BATCH = "batch"
"""Key of the record ``together``: a random number of these messages alone."""

POLL_EVERY = "poll-every"
"""Key of a message's record ``pace``: seconds between the node's next polls for messages."""

NOTICE = "notice"
"""Record with texts for the log of the node's owner. The node's process takes it away before guard
and app see the message."""

PACE = "pace"
"""Record with which a server spaces the polls of many nodes that take part in a phase.

For the node's process alone: the ClientApp takes it away before any handler or mod reads the
message."""

MIN_OF_A_CLASS = "fewest-of-a-class"
REAL_PER_VIRTUAL = "real-per-virtual"
"""Key of the node config: samples that a class must have for the app to use it."""

CLASSES = "classes"
"""Key of the node config: the classes that the app uses, with commas between their names."""

HOLDOUT = "holdout"
HOLDOUT_SECRET = "holdout-secret"
"""Keys of the node config: share of its samples that a node holds out whatever runs say, and the
secret that draws them, as hexadecimal text."""

COUNTS_EPSILON = "counts-epsilon"
"""Key of the node config: the epsilon at which the node, not the app, puts noise on counts."""

STATISTICS = "statistics"
"""Record of counts of a node's data, the policy's key for them, and that of the node config, which
shows that a guard rounds them."""

FILE = "file."
"""Beginning of keys of the node config, ``file.@NAME``: paths that runs name as ``@NAME``."""

DATASET = "dataset"
"""Key of the node config and of the describe reply's config: the node's own data set."""

FINGERPRINT = "fingerprint"
"""Config key of the describe reply: a hash of the data that a node has read, keyed by a secret of
its own and the run."""

NAME = "name"
"""Key of the node config and of the describe reply's config: the node's name."""

SECTOR = "sector"
"""Key of the node config and of the describe reply: the sector declared by the node's owner."""

EDGE = "edge"
"""Key of the node config of an edge's node: folder of the edge's sockets."""


def ranked(records: Mapping[str, T], name: str) -> dict[int, T]:
    """Entries ``<name>.<rank>`` by rank, in their order; ValueError if a rank is no number."""
    start = f"{name}."
    by_rank = {k.removeprefix(start): v for k, v in records.items() if k.startswith(start)}
    if odd := [rank for rank in by_rank if not rank.isdecimal()]:
        raise ValueError(f"{start}{odd[0][:20]}: its rank is no number")
    return {int(rank): value for rank, value in by_rank.items()}
