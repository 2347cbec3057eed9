"""Message types and record keys that both sides name, whatever the method.

The action in a message type must be a Python identifier (Flower checks it), hence the underscores;
keys inside records follow Flower's own style (``num-examples``, ``server-round``).
"""

ARRAYS = "arrays"
CONFIG = "config"
METRICS = "metrics"
NUM_EXAMPLES = "num-examples"
NUM_STEPS = "num-steps"
PARTITION_ID = "partition-id"
SERVER_ROUND = "server-round"
TRAIN_ACCURACY = "train-accuracy"
TRAIN_LOSS = "train-loss"

PARCEL = "parcel"
"""Name of the record (on to a head: ``parcel.<rank>``) with what a node sends another."""

INTRODUCTION = "introduction"
"""Name of the record by which a node can be sent to (:class:`links.records.Introduction`)."""

ROUTE = "route"
"""Name of the record with which a node sends a parcel (:class:`links.records.Route`)."""

DELIVERY = "delivery"
"""Name of the record (of several: ``delivery.<rank>``) with what another node sent."""

REJECTED = "rejected"
"""Metric of a reply: how many parcels or models a head or leader set aside. In a leader's config
``rejected.<rank>`` says why."""

DATASET = "dataset"
"""The data set that a node holds in place of the run's: key of the node config, and of the describe
reply's config."""

SECTOR = "sector"
"""The sector that a node's owner gave it: key of the node config, and of the describe reply."""
