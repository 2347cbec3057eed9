"""Message types and record keys that both sides of a federation name.

The action in a message type must be a Python identifier (Flower checks it), hence the underscores;
keys inside records follow Flower's own style (``num-examples``, ``server-round``).
"""

DESCRIBE = "query.describe"
"""Ask a node who it is: partition, number of examples, input shape, classes."""

LABEL_KNOWLEDGE = "query.label_knowledge"
"""Ask a node for its soft labels on the global auxiliary set (HFLDD, step 1)."""

DISTILL = "train.distill"
"""Ask a cluster member to distil its data for its head (HFLDD, step 4)."""

RECEIVE = "train.receive"
"""Hand a cluster head the parcels of its members (HFLDD, step 4)."""

ARRAYS = "arrays"
CONFIG = "config"
METRICS = "metrics"
NUM_EXAMPLES = "num-examples"
PARTITION_ID = "partition-id"
SERVER_ROUND = "server-round"

TRAIN_ON = "train-on"
"""Config key of a train message: ``own`` (default) or ``pooled``, a head's D_h."""

SOFT_LABELS = "soft-labels"

PARCEL = "parcel"
"""Name of the record (on to a head: ``parcel.<rank>``) with what a node sends another."""

PAYLOAD = "payload"
SENDER = "sender"
