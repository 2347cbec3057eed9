"""Grouping and clustering of clients by their soft labels (HFLDD, section IV)."""

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from sklearn.metrics import silhouette_score

MOST_GROUPS_TRIED = 20
SMALLEST_PROBABILITY = 1e-10


def kl_matrix(soft_labels: NDArray[np.floating]) -> NDArray[np.float64]:
    """Kullback-Leibler divergence between every two clients' soft labels.

    ``M_ij = 1/|D_g| * sum_k sum_c S_i[k, c] log(S_i[k, c] / S_j[k, c])``, as one matrix product
    (HFLDD, step 2): with P the flattened probabilities and L their logarithms,
    ``M = (rowsum(P * L) - P L^T) / |D_g|``.

    Parameters
    ----------
    soft_labels : NDArray
        Softmax outputs, (clients, auxiliary samples, classes). Probabilities are clipped to 1e-10,
        so that a class that a client rules out does not make M infinite.

    Returns
    -------
    NDArray
        M in nats, (clients, clients); zero on the diagonal.
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
    divergence: NDArray[np.float64], num_groups: int | None, seed: int
) -> NDArray[np.int64]:
    """Group clients with similar label distributions: K-means on the rows of M (HFLDD, step 2).

    Parameters
    ----------
    divergence : NDArray
        M from :func:`kl_matrix`, (clients, clients).
    num_groups : int, optional
        K, lowered to the number of distinct rows if it is higher. If None, the K between 2 and 20
        with the best silhouette.
    seed : int
        Seed of K-means.

    Returns
    -------
    NDArray
        Group index of each client, (clients,); indices have no gaps.
    """
    most = len(np.unique(divergence.round(12), axis=0))
    if num_groups is None:
        num_groups = _best_silhouette(divergence, most, seed)
    labels = _kmeans(divergence, min(num_groups, most), seed)
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)


def _kmeans(rows: NDArray[np.float64], num_groups: int, seed: int) -> NDArray[np.int64]:
    labels = KMeans(n_clusters=num_groups, n_init=10, random_state=seed).fit_predict(rows)
    return np.asarray(labels, dtype=np.int64)


def _best_silhouette(rows: NDArray[np.float64], num_distinct: int, seed: int) -> int:
    """K with the best mean silhouette; 1 if there are too few distinct rows to compare."""
    candidates = range(2, min(num_distinct, len(rows) - 1, MOST_GROUPS_TRIED) + 1)
    scores = {k: silhouette_score(rows, _kmeans(rows, k, seed)) for k in candidates}
    return max(scores, key=lambda k: scores[k]) if scores else 1


def heterogeneous_clusters(
    groups: NDArray[np.int64], generator: np.random.Generator
) -> list[list[int]]:
    """Form clusters of one client from every group (HFLDD, algorithm 1).

    While any group is non-empty, one random client of each non-empty group joins the next cluster.

    Parameters
    ----------
    groups : NDArray
        Group index of each client, (clients,).
    generator : np.random.Generator
        Source of the random draws.

    Returns
    -------
    list[list[int]]
        Client indices of each cluster; every client is in exactly one. There are as many clusters
        as clients in the largest group.
    """
    shuffled = [
        generator.permutation(np.flatnonzero(groups == group)).tolist()
        for group in np.unique(groups)
    ]
    largest = max(len(group) for group in shuffled)
    return [[group[i] for group in shuffled if i < len(group)] for i in range(largest)]


def nearest_group(soft_labels: NDArray[np.floating], group_means: NDArray[np.floating]) -> int:
    """Find the homogeneous group of a new client: the least divergence from the group's mean.

    Parameters
    ----------
    soft_labels : NDArray
        The client's, (auxiliary samples, classes).
    group_means : NDArray
        Mean soft labels of each group, (groups, auxiliary samples, classes).
    """
    return int(kl_matrix(np.stack([soft_labels, *group_means]))[0, 1:].argmin())


def cluster_to_join(clusters: Sequence[Sequence[int]], group: Collection[int]) -> int:
    """The cluster with the fewest clients of a new client's group; of several, the smallest."""
    sizes = [(sum(client in group for client in cluster), len(cluster)) for cluster in clusters]
    return sizes.index(min(sizes))
