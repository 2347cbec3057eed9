"""Cluster-skewed partitions: the nodes of a cluster have the same classes (CADIS).

Consecutive nodes form clusters by ratio; consecutive classes form as many blocks, as equal as
possible. The paper's main cluster has 60 % of the nodes; four equal other clusters, and the ratio
of MC, are our choice. The authors' published MNIST index files have five clusters of two digits in
the ratio 3:3:2:1:1, and on unbalanced nodes 1 to 5 units of 7 samples per digit.
"""

import numpy as np
from numpy.typing import NDArray

from flwr_distill.task.partition.dealing import available, deal
from flwr_distill.task.partition.request import Indices, PartitionError, Request

SEVERAL = "12:5:3"
ONE_MAIN = "6:1:1:1:1"
MOST_UNITS = 5


def multi_cluster(request: Request) -> list[Indices]:
    """MC: several clusters of unequal sizes, equally many samples per node."""
    return deal(request, _balanced(request, SEVERAL))


def balanced_cluster(request: Request) -> list[Indices]:
    """BC: one main cluster of 60 % of the nodes, equally many samples per node."""
    return deal(request, _balanced(request, ONE_MAIN))


def unbalanced_cluster(request: Request) -> list[Indices]:
    """UC: the clusters of BC; a node has 1 to 5 units of samples, drawn, of each of its classes.

    The unit is the largest that all classes have enough samples for.
    """
    classes, counts = available(request.labels)
    rng = np.random.default_rng([request.seed, 1])
    units = np.zeros((request.num_partitions, len(classes)), dtype=np.int64)
    for nodes, block in nodes_and_classes(request, ONE_MAIN):
        units[nodes, block] = rng.integers(1, MOST_UNITS + 1, units[nodes, block].shape)
    unit = int((counts // units.sum(axis=0)).min())
    if not unit:
        raise _too_few(request)
    return deal(request, unit * units)


def _balanced(request: Request, ratio: str) -> NDArray[np.int64]:
    """Samples of each class on each node, with equal totals.

    Nodes of a cluster take samples of its c classes in turn, which keeps classes balanced: of the
    first t samples, ``ceil((t - k) / c)`` are of class k.
    """
    classes, counts = available(request.labels)
    clusters = nodes_and_classes(request, ratio)
    most = []
    for nodes, block in clusters:
        own = counts[block]
        most.append((len(own) * own + np.arange(len(own))).min() // (nodes.stop - nodes.start))
    each = int(min(most))
    if not each:
        raise _too_few(request)
    sample_counts = np.zeros((request.num_partitions, len(classes)), dtype=np.int64)
    for nodes, block in clusters:
        num_classes = block.stop - block.start
        turns = np.arange(nodes.stop - nodes.start + 1)[:, None] * each - np.arange(num_classes)
        sample_counts[nodes, block] = np.diff(-(-turns // num_classes), axis=0)
    return sample_counts


def nodes_and_classes(request: Request, ratio: str) -> list[tuple[slice, slice]]:
    """Nodes and classes (by position) of each cluster; PartitionError if one would have none."""
    parts = (request.clusters or ratio).split(":")
    shares = np.array([int(share) if share.isdecimal() else 0 for share in parts])
    num_classes = len(available(request.labels)[0])
    most = min(request.num_partitions, num_classes)
    if len(shares) > most or not shares.all():
        raise PartitionError(
            f"partition.clusters={request.clusters or ratio!r} must be 1 to {most} sizes >= 1, as "
            f"in 12:5:3: each cluster needs at least one of {request.num_partitions} nodes and "
            f"of {num_classes} classes"
        )
    ideal_sizes = request.num_partitions * shares / shares.sum()
    sizes = np.ones_like(shares)
    for _ in range(request.num_partitions - len(shares)):
        sizes[np.argmax(ideal_sizes - sizes)] += 1
    blocks = np.array_split(np.arange(num_classes), len(shares))
    return [
        (slice(end - size, end), slice(block[0], block[-1] + 1))
        for size, end, block in zip(sizes, sizes.cumsum(), blocks, strict=True)
    ]


def _too_few(request: Request) -> PartitionError:
    return PartitionError(
        f"partition.scheme: {len(request.labels)} samples are too few for clusters of "
        f"{request.num_partitions} nodes, which share the same few classes; use fewer nodes"
    )
