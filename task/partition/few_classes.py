"""Partitions in which every node has a few classes, by rule or by a power law."""

import numpy as np
from numpy.typing import NDArray

from flwr_distill.task.partition.dealing import available, deal
from flwr_distill.task.partition.request import Indices, PartitionError, Request


def pathological(request: Request) -> list[Indices]:
    """Give node i the classes ``(i * C + k) mod K``, each split equally among its nodes."""
    classes, counts = available(request.labels)
    nodes, per_node = request.num_partitions, checked_classes(request, len(classes))
    node_classes = np.arange(nodes * per_node).reshape(nodes, per_node) % len(classes)
    holds = np.zeros((nodes, len(classes)), dtype=np.int64)
    holds[np.arange(nodes)[:, None], node_classes] = 1
    holders = _holders(request, holds)
    share, rest = np.divmod(counts, holders.clip(1))
    first = holds.cumsum(axis=0) <= rest  # these nodes get one sample more
    return deal(request, holds * (share + first))


def pareto(request: Request) -> list[Indices]:
    """Split each class among nodes whose sizes follow a power law.

    Node i has C random classes; all classes have equally many nodes. The nodes of a class get one
    sample each, and shares of the others in proportion to u_i, drawn from a Pareto distribution,
    ``P(u_i > x) = x^-alpha``.
    """
    if not 0 < request.alpha < np.inf:
        raise PartitionError(
            f"partition.alpha must be > 0, got {request.alpha} (0.5 for sizes from few samples to "
            "thousands, 5 for similar sizes)"
        )
    classes, counts = available(request.labels)
    per_node = checked_classes(request, len(classes))
    rng = np.random.default_rng([request.seed, 1])
    holds = np.zeros((request.num_partitions, len(classes)), dtype=np.int64)
    for row in holds:
        fewest_first = np.lexsort((rng.random(len(classes)), holds.sum(axis=0)))
        row[fewest_first[:per_node]] = 1
    spare = counts - _holders(request, holds)
    weights = holds * (1 + rng.pareto(request.alpha, (request.num_partitions, 1)))
    shares = weights / weights.sum(axis=0).clip(1)
    return deal(request, holds + (shares * spare).astype(np.int64))


def checked_classes(request: Request, num_classes: int) -> int:
    """Classes per node; PartitionError if the data have fewer."""
    if not 1 <= request.classes_per_node <= num_classes:
        raise PartitionError(
            f"partition.classes must be 1 to {num_classes}, the number of classes in the data, "
            f"got {request.classes_per_node}"
        )
    return request.classes_per_node


def _holders(request: Request, holds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number of nodes per class; at most the class's samples."""
    classes, counts = available(request.labels)
    holders: NDArray[np.int64] = holds.sum(axis=0)
    for label, count, number in zip(classes, counts, holders, strict=True):
        if count < number:
            raise PartitionError(
                f"class {label} has {count} samples for the {number} nodes that have it with "
                f"num-partitions={request.num_partitions} and "
                f"partition.classes={request.classes_per_node}; lower either"
            )
    return holders
