"""Which samples each node holds."""

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from flwr_datasets.partitioner import Partitioner

Indices = NDArray[np.int64]


class PartitionError(ValueError):
    """A partition that cannot be made; the message names the setting and what is allowed."""


@dataclass(frozen=True)
class _Request:
    labels: Indices
    num_partitions: int
    classes_per_node: int
    alpha: float
    seed: int
    index_file: str | Path | None


def partition_indices(
    labels: NDArray[np.int64],
    num_partitions: int,
    *,
    scheme: str = "pathological",
    classes_per_node: int = 2,
    alpha: float = 0.5,
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
    scheme : str
        How to split. Default: ``"pathological"``.

        - ``iid``: equal shares of the shuffled samples.
        - ``pathological``: node i holds the C classes ``(i * C + k) mod K``, k = 0 .. C-1 of the K
          classes: blocks of classes that repeat, so that several nodes have equal label
          distributions (HFLDD's setting) and every class is held by some node whenever
          N * C >= K (where it is not, the classes left over are unused). A class is shared out
          equally among its holders. Computed here: flwr-datasets' partitioner offers only
          overlapping or random assignments of classes.
        - ``dirichlet``: each class is shared out by proportions from Dirichlet(alpha), drawn
          again (up to ten times) while a node is empty.
        - ``shards``: samples sorted by label and cut into N * C equal shards, C random ones a
          node; the fewer than N * C samples that remain are unused.
        - ``index-file``: as ``index_file`` says.
    classes_per_node : int
        C, for ``pathological`` (classes) and ``shards`` (shards). Default: 2.
    alpha : float
        Concentration for ``dirichlet``; small values mean strong label skew. Default: 0.5.
    seed : int
        Seed of every random choice. Default: 0.
    index_file : str or Path, optional
        JSON object, client id (``"0"`` to ``str(N - 1)``) -> list of sample indices, which may be
        nested under one top key. Samples that it does not name are unused. Default: None.

    Returns
    -------
    list of ndarray
        Per node its sample indices: int64, sorted, no sample on two nodes, none empty.

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
    if scheme not in _SCHEMES:
        raise PartitionError(
            f"partition.scheme={scheme!r} is unknown; choose one of {', '.join(_SCHEMES)}"
        )
    request = _Request(labels, num_partitions, classes_per_node, alpha, seed, index_file)
    parts = [np.sort(np.asarray(part, dtype=np.int64)) for part in _SCHEMES[scheme](request)]
    for node, part in enumerate(parts):
        if not len(part):
            raise PartitionError(
                f"partition.scheme={scheme!r} leaves node {node} of {num_partitions} without "
                "samples; use fewer nodes"
            )
    return parts


def _iid(request: _Request) -> list[Indices]:
    from flwr_datasets.partitioner import IidPartitioner

    return _by_library(IidPartitioner(request.num_partitions), request)


def _dirichlet(request: _Request) -> list[Indices]:
    from flwr_datasets.partitioner import DirichletPartitioner

    if not 0 < request.alpha < np.inf:
        raise PartitionError(
            f"partition.alpha must be > 0, got {request.alpha} (try 0.1 for strong label skew)"
        )
    partitioner = DirichletPartitioner(
        request.num_partitions,
        partition_by="label",
        alpha=float(request.alpha),
        min_partition_size=1,
        seed=request.seed,
    )
    try:
        return _by_library(partitioner, request)
    except ValueError as error:
        raise PartitionError(
            f"partition.alpha={request.alpha} left some of {request.num_partitions} nodes without "
            "samples in every draw; raise alpha, use fewer nodes or change the seed"
        ) from error


def _shards(request: _Request) -> list[Indices]:
    from flwr_datasets.partitioner import ShardPartitioner

    shards = request.num_partitions * request.classes_per_node
    if request.classes_per_node < 1 or shards > len(request.labels):
        raise PartitionError(
            f"partition.classes must be 1 to {len(request.labels) // request.num_partitions} for "
            f"shards ({len(request.labels)} samples on {request.num_partitions} nodes), "
            f"got {request.classes_per_node}"
        )
    partitioner = ShardPartitioner(
        request.num_partitions,
        partition_by="label",
        num_shards_per_partition=request.classes_per_node,
        seed=request.seed,
    )
    return _by_library(partitioner, request)


def _by_library(partitioner: "Partitioner", request: _Request) -> list[Indices]:
    """Run a partitioner on the shuffled samples (it keeps their order within a class)."""
    from datasets import Dataset

    order = np.random.default_rng(request.seed).permutation(len(request.labels))
    partitioner.dataset = Dataset.from_dict({"label": request.labels[order], "sample": order})
    with warnings.catch_warnings(action="ignore"):  # Dirichlet: one for each draw that failed
        return [
            np.asarray(partitioner.load_partition(node)["sample"])
            for node in range(request.num_partitions)
        ]


def _pathological(request: _Request) -> list[Indices]:
    labels, nodes, per_node = request.labels, request.num_partitions, request.classes_per_node
    classes = np.unique(labels)
    if not 1 <= per_node <= len(classes):
        raise PartitionError(
            f"partition.classes must be 1 to {len(classes)}, the number of classes in the data, "
            f"got {per_node}"
        )
    held = np.arange(nodes * per_node).reshape(nodes, per_node) % len(classes)
    rng = np.random.default_rng(request.seed)
    parts: list[list[Indices]] = [[] for _ in range(nodes)]
    for position, label in enumerate(classes):
        holders = np.flatnonzero((held == position).any(axis=1))
        samples = rng.permutation(np.flatnonzero(labels == label))
        if len(samples) < len(holders):
            raise PartitionError(
                f"class {label} has {len(samples)} samples for the {len(holders)} nodes that hold "
                f"it with num-partitions={nodes} and partition.classes={per_node}; lower either"
            )
        if len(holders):
            for node, share in zip(holders, np.array_split(samples, len(holders)), strict=True):
                parts[node].append(share)
    return [np.concatenate(shares) for shares in parts]


def _index_file(request: _Request) -> list[Indices]:
    path = request.index_file
    if path is None:
        raise PartitionError(
            "partition.scheme='index-file' needs partition.index-file, the path of a JSON file "
            "with client id -> list of sample indices"
        )
    clients = _read_clients(Path(path))
    expected = {str(node) for node in range(request.num_partitions)}
    if set(clients) != expected:
        missing, surplus = sorted(expected - set(clients)), sorted(set(clients) - expected)
        raise PartitionError(
            f"{path}: client ids must be 0 to {request.num_partitions - 1}, one for each node; "
            f"missing: {missing[:5]}, surplus: {surplus[:5]}"
        )
    parts = [
        _checked_indices(clients[str(node)], len(request.labels), f"{path}: client {node}")
        for node in range(request.num_partitions)
    ]
    samples, counts = np.unique(np.concatenate(parts), return_counts=True)
    if (counts > 1).any():
        raise PartitionError(
            f"{path}: samples are named more than once: {samples[counts > 1][:5].tolist()}; "
            "give each to one client"
        )
    return parts


def _read_clients(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PartitionError(
            f"partition.index-file={str(path)!r} cannot be read as JSON ({error})"
        ) from error
    if isinstance(content, dict) and len(content) == 1:
        (nested,) = content.values()
        content = nested if isinstance(nested, dict) else content
    if not isinstance(content, dict):
        raise PartitionError(f"{path}: need a JSON object, client id -> list of sample indices")
    return content


def _checked_indices(indices: object, num_samples: int, where: str) -> Indices:
    if not isinstance(indices, list) or not all(type(index) is int for index in indices):
        raise PartitionError(f"{where} needs a list of whole numbers, its sample indices")
    outside = [index for index in indices if not 0 <= index < num_samples]
    if outside:
        raise PartitionError(
            f"{where} names samples {outside[:5]}, but the {num_samples} samples are numbered "
            f"0 to {num_samples - 1}"
        )
    return np.array(indices, dtype=np.int64)


_SCHEMES: dict[str, Callable[[_Request], list[Indices]]] = {
    "iid": _iid,
    "pathological": _pathological,
    "dirichlet": _dirichlet,
    "shards": _shards,
    "index-file": _index_file,
}
