"""Splits of samples among nodes."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flwr_distill.task.partition import schemes
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
        Classes (``pathological``, ``label-quantity``, ``pareto``) or shards (``shards``) of a node.
        0 takes the smallest number, but at least 2, with which the nodes together can have all
        classes.
    alpha : float (default: 0.5)
        Concentration for ``dirichlet``, exponent for ``pareto``; smaller means more skew.
    clusters : str (default: "")
        Ratio of nodes per cluster; empty means ``12:5:3`` for ``cluster-mc``, else ``6:1:1:1:1``.
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
    num_classes = len(np.unique(labels))
    per_node = classes_per_node or min(num_classes, max(2, math.ceil(num_classes / num_partitions)))
    request = Request(
        labels, num_partitions, per_node, alpha, clusters, seed, index_file, min_of_a_class
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
    return parts


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
    if scheme in ("pathological", "label-quantity", "pareto"):
        schemes.checked_classes(request, num_classes)
    if clusters and scheme.startswith("cluster-"):
        schemes.nodes_and_classes(request, clusters)
