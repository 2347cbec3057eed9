"""Distribute samples once each node's count per class is known."""

import numpy as np
from numpy.typing import NDArray

from flwr_distill.task.partition.request import Indices, Request


def available(labels: Indices) -> tuple[Indices, Indices]:
    """Classes in the data, and the number of samples of each."""
    return np.unique(labels, return_counts=True)


def deal(request: Request, counts: NDArray[np.int64]) -> list[Indices]:
    """Give each node its number of random samples per class: counts (nodes, classes)."""
    rng = np.random.default_rng(request.seed)
    parts: list[list[Indices]] = [[] for _ in counts]
    for label, wanted in zip(available(request.labels)[0], counts.T, strict=True):
        samples = rng.permutation(np.flatnonzero(request.labels == label))
        *shares, _ = np.split(samples, wanted.cumsum())
        for part, share in zip(parts, shares, strict=True):
            part.append(share)
    return [np.concatenate(shares) for shares in parts]
