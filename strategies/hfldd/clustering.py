"""Grouping and clustering of clients by their soft labels (HFLDD, section IV)."""

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from sklearn.metrics import silhouette_score

MAX_GROUPS_TRIED = 20
"""Up to this K all are tried."""
NO_STRUCTURE = 0.25
"""Silhouettes up to this show "no substantial structure" (Kaufman and Rousseeuw 1990)."""
SMALLEST_PROBABILITY = 1e-10
COVERED = 0.97
"""Chance, at least, that a random client's group has a client in a random cluster."""


def kl_matrix(soft_labels: NDArray[np.floating]) -> NDArray[np.float64]:
    """Kullback-Leibler divergence between every two clients' soft labels.

    ``M_ij = 1/|D_g| * sum_k sum_c S_i[k, c] log(S_i[k, c] / S_j[k, c])``, as one matrix product
    (HFLDD, step 2): with P the flattened probabilities and L their logarithms,
    ``M = (rowsum(P * L) - P L^T) / |D_g|``.

    Given (clients, auxiliary samples, classes); returns nats, (clients, clients). Probabilities are
    clipped to 1e-10, so that a class that a client rules out does not make M infinite.
    """
    num_clients, num_samples, _ = soft_labels.shape
    probabilities = np.clip(
        soft_labels.reshape(num_clients, -1).astype(np.float64), SMALLEST_PROBABILITY, None
    )
    logs = np.log(probabilities)
    entropies = np.einsum("ij,ij->i", probabilities, logs)
    divergence = (entropies[:, None] - probabilities @ logs.T) / num_samples
    np.fill_diagonal(divergence, 0.0)
    return np.asarray(divergence, dtype=np.float64)


def homogeneous_groups(
    divergence: NDArray[np.float64],
    num_groups: int | None,
    seed: int,
    *,
    least: int = 1,
    most: int = MAX_GROUPS_TRIED,
    noise: NDArray[np.float64] | None = None,
) -> NDArray[np.int64]:
    """Group clients with similar label distributions: K-means on the rows of M (HFLDD, step 2).

    Parameters
    ----------
    divergence : NDArray
        M from :func:`kl_matrix`, (clients, clients).
    num_groups : int, optional
        K, at most the number of distinct rows. None takes the K from `least` to `most` with the
        best silhouette.
    noise : NDArray, optional (default: None)
        Divergence between two random halves of each client's data, in nats, (clients,): by what
        clients of one label distribution differ. It decides whether all clients are alike (K = 1)
        or all differ (K = clients), where a plain silhouette is not defined. Without it, K is below
        the number of clients.

    Returns
    -------
    NDArray
        Group index of each client, (clients,), without gaps.
    """
    distinct = len(np.unique(divergence.round(12), axis=0))
    if num_groups is None:
        num_groups = _best_number(divergence, least, min(distinct, most), seed, noise)
    return _kmeans(divergence, min(num_groups, distinct), seed)


def _kmeans(rows: NDArray[np.float64], num_groups: int, seed: int) -> NDArray[np.int64]:
    labels = KMeans(n_clusters=num_groups, n_init=10, random_state=seed).fit_predict(rows)
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)


def _best_number(
    divergence: NDArray[np.float64],
    least: int,
    most: int,
    seed: int,
    noise: NDArray[np.float64] | None,
) -> int:
    """K with the best silhouette; 1 if none shows a structure and so few are allowed."""
    if noise is None:
        most = min(most, len(divergence) - 1)
    scores = {1: -1.0 if noise is None or least > 1 else NO_STRUCTURE}
    for num_groups in _candidates(most):
        labels = _kmeans(divergence, num_groups, seed)
        if noise is None:
            scores[num_groups] = float(silhouette_score(divergence, labels))
        else:
            scores[num_groups] = silhouette_above_noise(divergence, labels, noise)
    return max(scores, key=lambda num_groups: scores[num_groups])


def _candidates(most: int) -> list[int]:
    """Each K from 2 to 20, and above in ever wider steps, up to `most`."""
    each = range(2, min(most, MAX_GROUPS_TRIED) + 1)
    wider = np.geomspace(MAX_GROUPS_TRIED, most, 10).round() if most > MAX_GROUPS_TRIED else ()
    return sorted({*each, *map(int, wider)})


def silhouette_above_noise(
    divergence: NDArray[np.float64], groups: NDArray[np.int64], noise: NDArray[np.float64]
) -> float:
    """Mean silhouette of clients whose distance to their own group is at least their noise.

    A client alone in its group has no distance to it, and the usual silhouette counts it as 0.
    Here it is as near to its group as one half of its data is to the other: about 1 if all other
    clients differ from it by much more, below 0 if they differ no more than its own halves do.

    Distances are the root of the symmetric divergence (`kl_matrix`). `groups` are indices without
    gaps, (clients,), of two groups or more; `noise` is that of `homogeneous_groups`.
    """
    clients = np.arange(len(groups))
    distances = np.sqrt(np.maximum(divergence + divergence.T, 0) / 2)
    members = np.eye(groups.max() + 1)[groups]
    sums, sizes = distances @ members, members.sum(axis=0)
    own = sums[clients, groups] / np.maximum(sizes[groups] - 1, 1)
    to_groups = sums / sizes
    to_groups[clients, groups] = np.inf
    within, between = np.maximum(own, np.sqrt(noise)), to_groups.min(axis=1)
    larger = np.maximum(within, between).clip(SMALLEST_PROBABILITY)
    return float(np.mean((between - within) / larger))


def heterogeneous_clusters(
    groups: NDArray[np.int64], generator: np.random.Generator, *, complete: bool = False
) -> list[list[int]]:
    """Form clusters of one client from every group, given by client (HFLDD, algorithm 1).

    In the paper, while any group is non-empty, one random client of each non-empty group joins the
    next cluster. So the last clusters miss the small groups, and there are as many clusters as
    clients in the largest group.

    With `complete` there are fewer, so that every group has a client in nearly all of them
    (`COVERED`); the other clients of large groups join these. A few clients that are like no other
    do not make one cluster of all.

    Returns client indices of each cluster; every client is in exactly one.
    """
    shuffled = [
        generator.permutation(np.flatnonzero(groups == group)).tolist()
        for group in np.unique(groups)
    ]
    if not complete:
        largest = max(len(group) for group in shuffled)
        return [[group[i] for group in shuffled if i < len(group)] for i in range(largest)]
    number = _most_that_are_complete(np.array([len(group) for group in shuffled]))
    # Dealt in turn, from one group to the next: a group of so many clients reaches every cluster.
    dealt = [client for group in shuffled for client in group]
    return [dealt[first::number] for first in range(number)]


def _most_that_are_complete(sizes: NDArray[np.int64]) -> int:
    def covered(number: int) -> float:
        return float(sizes @ np.minimum(sizes, number)) / (number * float(sizes.sum()))

    return max(n for n in range(1, int(sizes.max()) + 1) if covered(n) >= COVERED)


def nearest_group(soft_labels: NDArray[np.floating], group_means: NDArray[np.floating]) -> int:
    """Group of a new client: the least divergence from the group's mean soft labels.

    The client's have the shape (auxiliary samples, classes), the groups' one dimension more.
    """
    return int(kl_matrix(np.stack([soft_labels, *group_means]))[0, 1:].argmin())


def cluster_to_join(clusters: Sequence[Sequence[int]], group: Collection[int]) -> int:
    """The cluster with the fewest clients of a new client's group; of several, the smallest."""
    alike = set(group)
    sizes = [(sum(client in alike for client in cluster), len(cluster)) for cluster in clusters]
    return sizes.index(min(sizes))
