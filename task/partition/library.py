"""Partitions by flwr-datasets' partitioners: equal shares, Dirichlet proportions, shards."""

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from flwr_distill.task.partition.request import Indices, PartitionError, Request

if TYPE_CHECKING:
    from flwr_datasets.partitioner import Partitioner


def iid(request: Request) -> list[Indices]:
    """Equal shares of the samples."""
    return _run(_partitioners().IidPartitioner(request.num_partitions), request)


def dirichlet(request: Request) -> list[Indices]:
    """Each class split by proportions from Dirichlet(alpha)."""
    if not 0 < request.alpha < np.inf:
        raise PartitionError(
            f"partition.alpha must be > 0, got {request.alpha} (try 0.1 for strong label skew)"
        )
    partitioner = _partitioners().DirichletPartitioner(
        request.num_partitions,
        partition_by="label",
        alpha=float(request.alpha),
        min_partition_size=1,
        seed=request.seed,
    )
    try:
        return _run(partitioner, request)
    except ValueError as error:
        raise PartitionError(
            f"partition.alpha={request.alpha} left some of {request.num_partitions} nodes without "
            "samples in every draw; raise alpha, use fewer nodes or change the seed"
        ) from error


def shards(request: Request) -> list[Indices]:
    """Some shards per node of the samples sorted by label."""
    num_shards = request.num_partitions * request.classes_per_node
    if request.classes_per_node < 1 or num_shards > len(request.labels):
        raise PartitionError(
            f"partition.classes must be 1 to {len(request.labels) // request.num_partitions} for "
            f"shards ({len(request.labels)} samples on {request.num_partitions} nodes), "
            f"got {request.classes_per_node}"
        )
    partitioner = _partitioners().ShardPartitioner(
        request.num_partitions,
        partition_by="label",
        num_shards_per_partition=request.classes_per_node,
        seed=request.seed,
    )
    return _run(partitioner, request)


def _partitioners() -> Any:
    """The partitioners of flwr-datasets, which is an extra."""
    try:
        from flwr_datasets import partitioner
    except ImportError as error:
        raise PartitionError(
            "partition.scheme: iid, dirichlet and shards need flwr-datasets ("
            "pip install 'flwr-distill[partitions]', on the nodes)"
        ) from error
    return partitioner


def _run(partitioner: "Partitioner", request: Request) -> list[Indices]:
    """Run a partitioner on the shuffled samples (it keeps their order within a class)."""
    from datasets import Dataset

    order = np.random.default_rng(request.seed).permutation(len(request.labels))
    partitioner.dataset = Dataset.from_dict({"label": request.labels[order], "sample": order})
    with warnings.catch_warnings(action="ignore"):  # Dirichlet warns of each failed draw
        return [
            np.asarray(partitioner.load_partition(node)["sample"])
            for node in range(request.num_partitions)
        ]
