"""Partitions from a file, to use a published split."""

import json
from pathlib import Path

import numpy as np

from flwr_distill.task.partition.request import Indices, PartitionError, Request
from flwr_distill.task.text_files import read_text


def index_file(request: Request) -> list[Indices]:
    """Read a JSON file, client id -> list of sample indices."""
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
            f"{path}: samples are listed more than once: {samples[counts > 1][:5].tolist()}; "
            "give each to one client"
        )
    return parts


def _read_clients(path: Path) -> dict[str, object]:
    try:
        content = json.loads(read_text(path), object_pairs_hook=_each_once)
    except (OSError, ValueError, RecursionError) as error:
        raise PartitionError(
            f"partition.index-file={str(path)!r} cannot be read as JSON ({error})"
        ) from error
    if isinstance(content, dict) and len(content) == 1:
        (nested,) = content.values()
        content = nested if isinstance(nested, dict) else content
    if not isinstance(content, dict):
        raise PartitionError(f"{path}: need a JSON object, client id -> list of sample indices")
    return content


def _each_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice[:60]!r} is there more than once; join its lists")
    return content


def _checked_indices(indices: object, num_samples: int, where: str) -> Indices:
    if not isinstance(indices, list) or not all(type(index) is int for index in indices):
        raise PartitionError(f"{where} needs a list of whole numbers, its sample indices")
    outside = [index for index in indices if not 0 <= index < num_samples]
    if outside:
        raise PartitionError(
            f"{where} lists samples {outside[:5]}, but the {num_samples} samples are numbered "
            f"0 to {num_samples - 1}"
        )
    return np.array(indices, dtype=np.int64)
