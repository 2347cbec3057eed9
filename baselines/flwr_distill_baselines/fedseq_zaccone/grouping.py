"""Superclients: groups of clients that are unlike, so that each sees every class (FedSeq)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MIN_PROBABILITY = 1e-10

Floats = NDArray[np.float64]


def evenness(superclient: Floats, clients: Floats) -> Floats:
    """How evenly a superclient would predict all classes with each client.

    ``1 - KL((p + q) / 2 || uniform)`` in nats, the greater the better (FedSeq's measure for
    confidences; Zaccone et al. 2022, section III-B).

    p is the superclient's mean prediction by its samples (classes,), q that of each client
    (clients, classes); the result is (clients,).
    """
    mean = ((superclient + clients) / 2).clip(MIN_PROBABILITY)
    return np.asarray(1 - (mean * np.log(mean * mean.shape[1])).sum(axis=1), dtype=np.float64)


def greedy_superclients(
    confidences: Floats, num_examples: NDArray[np.int64], least_samples: int, most_nodes: int
) -> list[list[int]]:
    """Form superclients one after the other, each time with the client that evens it out most.

    A superclient is complete with `least_samples` or `most_nodes`. If the last one has too few
    samples, its clients go where samples are fewest and there is room; those without stay together.

    Parameters
    ----------
    confidences : NDArray
        Mean predictions of each client, (clients, classes).
    num_examples : NDArray
        Samples of each client, (clients,).

    Returns
    -------
    list[list[int]]
        Clients of each superclient; every client is in exactly one.
    """

    def size(clients: Sequence[int]) -> int:
        return int(num_examples[list(clients)].sum())

    superclients: list[list[int]] = []
    current: list[int] = []
    left = list(range(len(confidences)))
    while left:
        if size(current) >= least_samples or len(current) == most_nodes:
            superclients.append(current)
            current = []
        scores = evenness(mixture(confidences, num_examples, current), confidences[left])
        current.append(left.pop(int(scores.argmax())))
    while current and superclients and size(current) < least_samples:
        with_room = [group for group in superclients if len(group) < most_nodes]
        if not with_room:
            break
        min(with_room, key=size).append(current.pop())
    return [*superclients, current] if current else superclients


def superclient_to_join(
    superclients: Sequence[Sequence[int]],
    confidences: Floats,
    num_examples: NDArray[np.int64],
    newcomer: Floats,
    most_nodes: int,
) -> int | None:
    """The superclient with room that a new client evens out most; None if all are full.

    `superclients` are indices of clients; for these, `confidences` and `num_examples` are as in
    `greedy_superclients`. `newcomer` is the new client's mean prediction, (classes,).
    """
    scores = {
        place: float(evenness(mixture(confidences, num_examples, group), newcomer[None])[0])
        for place, group in enumerate(superclients)
        if len(group) < most_nodes
    }
    return max(scores, key=scores.__getitem__) if scores else None


def mixture(confidences: Floats, num_examples: NDArray[np.int64], clients: Sequence[int]) -> Floats:
    """Mean prediction of some clients by their samples; uniform if there are none."""
    if not clients:
        return np.full(confidences.shape[1], 1 / confidences.shape[1])
    weights = num_examples[list(clients)]
    return np.average(confidences[list(clients)], axis=0, weights=weights)
