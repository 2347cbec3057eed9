"""Partition schemes by name, and checks common to all."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flwr_distill.task.partition.clusters import (
    balanced_cluster,
    multi_cluster,
    nodes_and_classes,
    unbalanced_cluster,
)
from flwr_distill.task.partition.few_classes import checked_classes, pareto, pathological
from flwr_distill.task.partition.index_file import index_file as by_index_file
from flwr_distill.task.partition.library import dirichlet, iid, shards
from flwr_distill.task.partition.request import Indices, PartitionError, Request

SCHEMES: dict[str, Callable[[Request], list[Indices]]] = {
    "iid": iid,
    "pathological": pathological,
    "dirichlet": dirichlet,
    "shards": shards,
    "pareto": pareto,
    "cluster-mc": multi_cluster,
    "cluster-bc": balanced_cluster,
    "cluster-uc": unbalanced_cluster,
    "index-file": by_index_file,
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
) -> list[Indices]:
    """Split samples among nodes.

    Parameters
    ----------
    labels : ndarray
        int64 (n,), the label of each sample.
    num_partitions : int
        Number of nodes N.
    scheme : str (default: "pathological")
        How to split:

        - ``iid``: equal shares of the shuffled samples.
        - ``pathological``: node i has the C classes ``(i * C + k) mod K``, k = 0 .. C-1 of the K
          classes. Blocks of classes repeat, so several nodes have equal label distributions
          (HFLDD's setting); all classes are used if N * C >= K. A class is split equally among its
          nodes. (flwr-datasets' partitioner only has overlapping or random assignments.)
        - ``dirichlet``: each class is split by proportions from Dirichlet(alpha), redrawn (up to
          ten times) while a node is empty.
        - ``shards``: samples are sorted by label and cut into N * C equal shards, C random ones per
          node; fewer than N * C samples are left unused.
        - ``pareto``: every node has C random classes, and a share of each in proportion to its size
          u, drawn from a power law, ``P(u > x) = x^-alpha`` (CADIS's PA).
        - ``cluster-mc``: clusters of nodes have different blocks of classes; all nodes have equally
          many samples (CADIS's MC).
        - ``cluster-bc``: the same with one main cluster of 60 % of the nodes (BC).
        - ``cluster-uc``: the same clusters, with 1 to 5 units of samples, drawn, per class and node
          (UC).
        - ``index-file``: from ``index_file``.
    classes_per_node : int (default: 0)
        C, for ``pathological`` and ``pareto`` (classes) and ``shards`` (shards). 0 takes the
        smallest C, but at least 2, with which the nodes together can hold all classes.
    alpha : float (default: 0.5)
        Concentration for ``dirichlet``, exponent for ``pareto``; smaller means more skew.
    clusters : str (default: "")
        Ratio of nodes per cluster; empty means ``12:5:3`` for ``cluster-mc``, else ``6:1:1:1:1``.
    seed : int (default: 0)
        Seed of all random draws.
    index_file : str or Path, optional (default: None)
        JSON object, client id (``"0"`` to ``str(N - 1)``) -> list of sample indices, may be
        nested under one top key. Samples not listed are unused.

    Returns
    -------
    list of ndarray
        Sample indices per node: int64, sorted, disjoint, none empty.

    Raises
    ------
    PartitionError
        If a setting is out of range or leaves a node without samples.

    Notes
    -----
    ``iid``, ``dirichlet`` and ``shards`` are flwr-datasets' partitioners on shuffled samples.
    """
    if not 1 <= num_partitions <= len(labels):
        raise PartitionError(
            f"num-partitions must be 1 to {len(labels)}, the number of samples, "
            f"got {num_partitions}"
        )
    if scheme not in SCHEMES:
        raise PartitionError(
            f"partition.scheme={scheme!r} is unknown; choose one of {', '.join(SCHEMES)}"
        )
    per_node = classes_per_node or _covering(labels, num_partitions)
    request = Request(labels, num_partitions, per_node, alpha, clusters, seed, index_file)
    parts = [np.sort(np.asarray(part, dtype=np.int64)) for part in SCHEMES[scheme](request)]
    for node, part in enumerate(parts):
        if not len(part):
            raise PartitionError(
                f"partition.scheme={scheme!r} leaves node {node} of {num_partitions} without "
                "samples; use fewer nodes"
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
    if scheme in ("pathological", "pareto"):
        checked_classes(request, num_classes)
    if clusters and scheme.startswith("cluster-"):
        nodes_and_classes(request, clusters)


def _covering(labels: NDArray[np.int64], num_partitions: int) -> int:
    """Classes per node with which all classes are held, but at least 2."""
    num_classes = len(np.unique(labels))
    return min(num_classes, max(2, math.ceil(num_classes / num_partitions)))
