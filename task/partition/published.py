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

    ``clusters`` are percentages of the nodes, ``30:30:20:10:10``: nodes of cluster k have classes
    2k and 2k + 1. Other nodes have random pairs of the other classes, each class as often as any.

    A node's number of samples is normal, with mean ``samples`` and a standard deviation of
    ``spread`` times that, at most two deviations away. Where a class has too few, or without
    ``samples``, all means are the largest that all classes allow.
    """
    classes, available = request.available()
    cluster_of = _clusters(request)
    rng = np.random.default_rng([request.seed, 1])
    has = np.zeros((request.num_partitions, len(classes)), dtype=np.int64)
    others = np.arange(2 * len(_percentages(request)), len(classes))
    for node, cluster in enumerate(cluster_of):
        if cluster < 0:
            fewest_first = np.lexsort((rng.random(len(others)), has[:, others].sum(axis=0)))
            has[node, others[fewest_first[:2]]] = 1
        else:
            has[node, 2 * cluster : 2 * cluster + 2] = 1
    room = MAX_DEVIATIONS * request.spread
    relative = rng.normal(1.0, request.spread, request.num_partitions).clip(1 - room, 1 + room)
    of_a_class = _means(request, cluster_of) / 2 * relative
    wanted = has.T @ of_a_class
    used = wanted > 0
    fit = (available[used] / wanted[used]).min()
    if request.samples:
        fit = min(fit, 1.0)
    each = np.maximum(1, (fit * of_a_class + 1e-9).astype(np.int64))
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


def check_pairs(request: Request) -> None:
    """Raise PartitionError if the clusters need more nodes or classes than there are."""
    num_classes, shares = len(request.available()[0]), _percentages(request)
    spare, rest = num_classes - 2 * len(shares), 100 - sum(shares)
    if rest < 0 or spare < 0 or (rest and spare < 2):
        raise PartitionError(
            f"must be percentages of at most 100, with two of {num_classes} classes for each "
            "cluster, and two for nodes in none",
            where="partition.clusters",
            value=request.clusters,
            remedy="as in 30:30:20:10:10, for 10 classes",
        )


def _percentages(request: Request) -> list[int]:
    return [int(share) for share in request.clusters.split(":")] if request.clusters else []


def _clusters(request: Request) -> NDArray[np.int64]:
    """Cluster of each node; -1 for none."""
    check_pairs(request)
    ends = np.cumsum(_percentages(request)) * request.num_partitions / 100
    nodes = np.arange(request.num_partitions)
    cluster_of: NDArray[np.int64] = np.searchsorted(ends.round(), nodes, side="right")
    return np.where(cluster_of < len(ends), cluster_of, -1)


def _means(request: Request, cluster_of: NDArray[np.int64]) -> NDArray[np.float64]:
    """Mean samples of each node: its cluster's, whose last is that of all others."""
    means = np.array([float(mean) for mean in (request.samples or "1").split(":")])
    return means[np.where(cluster_of < 0, -1, np.minimum(cluster_of, len(means) - 1))]


def _checked(
    wanted: NDArray[np.int64], available: NDArray[np.int64], request: Request
) -> NDArray[np.int64]:
    """Samples by node and class; PartitionError if a class does not have as many."""
    for label, count, needed in zip(
        request.available()[0], available, wanted.sum(axis=0), strict=True
    ):
        if count < needed:
            raise PartitionError(
                f"class {label} has {count} samples, and its nodes need {needed} at least",
                where="partition.scheme",
                remedy="use fewer nodes",
            )
    return wanted
