"""Splits of samples among nodes."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flwr_distill.task.partition import published, schemes
from flwr_distill.task.partition.schemes import Indices, Request
from flwr_distill.task.partition.schemes import PartitionError as PartitionError  # re-exported

SCHEMES: dict[str, Callable[[Request], list[Indices]]] = {
    "iid": schemes.iid,
    "pathological": schemes.pathological,
    "dirichlet": schemes.dirichlet,
    "shards": schemes.shards,
    "label-quantity": schemes.label_quantity,
    "pareto": schemes.pareto,
    "cluster-mc": schemes.multi_cluster,
    "cluster-bc": schemes.balanced_cluster,
    "cluster-uc": schemes.unbalanced_cluster,
    "class-pairs": published.class_pairs,
    "pareto-draws": published.pareto_draws,
    "index-file": schemes.index_file,
}


def partition_indices(
    labels: NDArray[np.int64],
    num_partitions: int,
    *,
    scheme: str = "pathological",
    classes_per_node: int = 0,
    alpha: float = 0.5,
    clusters: str = "",
    samples: str = "",
    spread: float = 0.0,
    pooled: int = 0,
    seed: int = 0,
    index_file: str | Path | None = None,
    min_of_a_class: int = 0,
) -> list[Indices]:
    """Split samples among nodes: sorted indices for each, disjoint, none empty.

    Parameters
    ----------
    labels : ndarray
        int64 (n,), the label of each sample.
    num_partitions : int
        Number of nodes.
    scheme : str (default: "pathological")
        One of `SCHEMES`; each function of `task.partition.schemes` describes its own.
    classes_per_node : int (default: 0)
        Classes (``pathological``, ``label-quantity``, ``pareto``, ``pareto-draws``) or shards
        (``shards``) of a node. 0 takes the smallest number, but at least 2, with which the nodes
        together can have all
        classes.
    alpha : float (default: 0.5)
        Concentration for ``dirichlet``, exponent for ``pareto`` and ``pareto-draws``; smaller means
        more skew.
    clusters : str (default: "")
        Ratio of nodes per cluster; empty means ``12:5:3`` for ``cluster-mc``, else ``6:1:1:1:1``.
        Percentages of the nodes for ``class-pairs``.
    samples : str (default: "")
        For ``class-pairs``, mean number of samples of a node of each cluster; the last one is that
        of all others. Empty means as many as all classes allow, as do means that are too large.
    spread : float (default: 0.0)
        For ``class-pairs``, the standard deviation of nodes' samples as a share of their mean.
    pooled : int (default: 0)
        If above 0, the number of nodes among which samples are split, and a single node has all
        their parts together.
    seed : int (default: 0)
        Seed of all random draws.
    index_file : str or Path, optional (default: None)
        JSON object, client id (``"0"`` to ``str(num_partitions - 1)``) -> list of sample indices,
        perhaps nested under one top key. Samples not listed are unused.
    min_of_a_class : int (default: 0)
        Fewest samples of each class on each node, for ``dirichlet``.

    Raises
    ------
    PartitionError
        If a setting is out of range or leaves a node without samples.
    """
    if not 1 <= num_partitions <= len(labels):
        raise PartitionError(
            f"must be 1 to {len(labels)}, the number of samples",
            where="num-partitions",
            value=num_partitions,
        )
    if scheme not in SCHEMES:
        raise PartitionError(
            "is unknown",
            where="partition.scheme",
            value=scheme,
            remedy=f"choose one of {', '.join(SCHEMES)}",
        )
    if pooled and num_partitions > 1:
        raise PartitionError(
            f"gives all parts to a single node, and there are {num_partitions}",
            where="partition.pooled",
            value=pooled,
            remedy="set min-nodes to 1, or this to 0",
        )
    num_partitions = pooled or num_partitions
    num_classes = len(np.unique(labels))
    per_node = classes_per_node or min(num_classes, max(2, math.ceil(num_classes / num_partitions)))
    request = Request(
        labels,
        num_partitions,
        per_node,
        alpha,
        clusters,
        seed,
        index_file,
        samples,
        spread,
        min_of_a_class,
    )
    parts = [np.sort(np.asarray(part, dtype=np.int64)) for part in SCHEMES[scheme](request)]
    for node, part in enumerate(parts):
        if not len(part):
            raise PartitionError(
                f"leaves node {node} of {num_partitions} without samples",
                where="partition.scheme",
                value=scheme,
                remedy="use fewer nodes",
            )
    return [np.sort(np.concatenate(parts))] if pooled else parts


def draw_samples(
    labels: NDArray[np.int64], *, max_of_a_class: int = 0, reserved: int = 0, seed: int = 0
) -> tuple[Indices, Indices]:
    """Draw the samples that nodes share, and those that no node gets.

    Parameters
    ----------
    labels : ndarray
        int64 (n,), the label of each sample.
    max_of_a_class : int (default: 0)
        Samples of a class that are drawn at most, for both; 0 draws all.
    reserved : int (default: 0)
        Samples that no node gets.
    seed : int (default: 0)
        Seed of the draws.

    Returns
    -------
    shared : ndarray
        Indices in order, all without a limit and a reserve.
    reserved : ndarray
        Indices in random order, so that the first of them are a draw as well.

    Raises
    ------
    PartitionError
        If no sample is left for nodes.
    """
    order: Indices = np.random.default_rng([seed, 1]).permutation(len(labels))
    if max_of_a_class:
        rank = np.zeros(len(order), dtype=np.int64)  # of a sample in its class
        for label in np.unique(labels):
            own = labels[order] == label
            rank[own] = np.arange(own.sum())
        order = order[rank < max_of_a_class]
    if reserved >= len(order):
        raise PartitionError(
            f"leaves none of {len(order)} training samples to nodes",
            where="partition.reserved",
            value=reserved,
        )
    return np.sort(order[reserved:]), order[:reserved]


def check_partition(
    labels: NDArray[np.int64], *, scheme: str, classes_per_node: int, clusters: str
) -> None:
    """Check what no number of nodes can make possible; arguments as of `partition_indices`.

    Raises
    ------
    PartitionError
        If a node would need more classes than there are, or a cluster had none.
    """
    num_classes = len(np.unique(labels))
    request = Request(labels, num_classes, classes_per_node or 1, 1.0, clusters, 0, None)
    if scheme in ("pathological", "label-quantity", "pareto", "pareto-draws"):
        schemes.checked_classes(request, num_classes)
    if scheme == "class-pairs":
        published.check_pairs(request)
    if clusters and scheme.startswith("cluster-"):
        schemes.nodes_and_classes(request, clusters)
