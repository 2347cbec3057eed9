"""Schemes that make splits like those published with CADIS's code."""

import numpy as np
from numpy.typing import NDArray

from flwr_distill.task.partition.schemes import (
    Indices,
    PartitionError,
    Request,
    checked_classes,
)

MAX_DEVIATIONS = 2.0
"""Standard deviations that a node's size may be away from the mean."""


def class_pairs(request: Request) -> list[Indices]:
    """Give each node two classes, equally many samples of each (CADIS's published MC, BC and UC).

    ``clusters`` are numbers of nodes, ``30:30:20:10:10``: nodes of cluster k have classes 2k and
    2k + 1. Further nodes have random pairs of the other classes, each class as often as any.

    A node's number of samples is normal, with mean ``samples`` and a standard deviation of
    ``spread`` times that, at most two deviations away. Without ``samples`` the mean is the largest
    that all classes allow, the same for all nodes.
    """
    classes, available = request.available()
    sizes, rest = sizes_of_clusters(request), np.arange(request.num_partitions)
    rng = np.random.default_rng([request.seed, 1])
    has = np.zeros((request.num_partitions, len(classes)), dtype=np.int64)
    for cluster, size in enumerate(sizes):
        members, rest = rest[:size], rest[size:]
        has[members, 2 * cluster : 2 * cluster + 2] = 1
    others = np.arange(2 * len(sizes), len(classes))
    for node in rest:
        fewest_first = np.lexsort((rng.random(len(others)), has[:, others].sum(axis=0)))
        has[node, others[fewest_first[:2]]] = 1
    drawn = rng.normal(1.0, request.spread, request.num_partitions)
    room = MAX_DEVIATIONS * request.spread
    relative = drawn.clip(1 - room, 1 + room)
    wanted = has.T @ relative
    most = (available / wanted)[wanted > 0].min() if not request.samples else _means(request, sizes)
    each = np.maximum(1, (most * relative + 1e-9).astype(np.int64))
    return request.deal(_checked(has * each[:, None], available, request))


def pareto_draws(request: Request) -> list[Indices]:
    """Draw C classes for each node, and its samples by a power law (CADIS's published PA).

    A class may be drawn twice, so a node has 1 to C classes. It has equally many samples of each
    draw, in proportion to u, ``P(u > x) = (1 + x)^-alpha``, and at least one. Shares are the
    largest that all classes allow.
    """
    alpha = request.checked_alpha("1.5 for the sizes of CADIS's splits")
    classes, available = request.available()
    checked_classes(request, len(classes))
    rng = np.random.default_rng([request.seed, 1])
    draws = rng.integers(len(classes), size=(request.num_partitions, request.classes_per_node))
    times = (draws[:, :, None] == np.arange(len(classes))).sum(axis=1)
    relative = rng.pareto(alpha, request.num_partitions)
    spare, wanted = available - times.sum(axis=0), times.T @ relative
    _checked(times, available, request)
    most = (spare / wanted.clip(min=1e-9))[wanted > 0].min(initial=np.inf)
    return request.deal(times * (1 + (most * relative).astype(np.int64))[:, None])


def sizes_of_clusters(request: Request) -> list[int]:
    """Nodes of each cluster; PartitionError if there are not enough, or no classes are left."""
    sizes = checked_pairs(request)
    rest = request.num_partitions - sum(sizes)
    spare = len(request.available()[0]) - 2 * len(sizes)
    if rest < 0 or (rest and spare < 2):
        raise PartitionError(
            f"must be at most {request.num_partitions} nodes, and leave two classes to those in "
            "no cluster",
            where="partition.clusters",
            value=request.clusters,
            remedy="as in 30:30:20:10:10, for 100 nodes and 10 classes",
        )
    return sizes


def checked_pairs(request: Request) -> list[int]:
    """Nodes of each cluster; PartitionError if the data have too few classes for a pair each."""
    sizes = [int(size) for size in request.clusters.split(":")] if request.clusters else []
    if 2 * len(sizes) > (num_classes := len(request.available()[0])):
        raise PartitionError(
            f"must be at most {num_classes // 2} clusters, of two of {num_classes} classes each",
            where="partition.clusters",
            value=request.clusters,
        )
    return sizes


def _means(request: Request, sizes: list[int]) -> NDArray[np.float64]:
    """Mean samples of a class on each node, from ``samples``, whose last is that of all others."""
    means = [int(mean) / 2 for mean in request.samples.split(":")]
    of_cluster = np.repeat(np.arange(len(sizes)), sizes)
    beyond = np.full(request.num_partitions - len(of_cluster), len(sizes))
    places = np.append(of_cluster, beyond).clip(max=len(means) - 1)
    return np.array(means)[places]


def _checked(
    wanted: NDArray[np.int64], available: NDArray[np.int64], request: Request
) -> NDArray[np.int64]:
    """Samples by node and class; PartitionError if a class does not have as many."""
    for label, count, needed in zip(
        request.available()[0], available, wanted.sum(axis=0), strict=True
    ):
        if count < needed:
            raise PartitionError(
                f"class {label} has {count} samples of {needed} that its nodes need",
                where="partition.samples",
                value=request.samples,
                remedy="lower it, or use fewer nodes",
            )
    return wanted
