"""Similarity of clients by what training changes, and their clusters and weights (CADIS)."""

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

Pairs = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Indices of two clients each."""
Judged = Literal["peak", "mean"]
"""By what of its similarity a pair is judged: the highest that its mean has been, or its mean."""
Rescaling = Literal["pairs", "positive"]
"""Values of which the lowest and highest rescale S: those of known pairs, or the positive ones and
1, every client's similarity to itself."""
Closure = Literal["full", "one-step", "none"]
"""Who shares a cluster: all that linked pairs connect, pairs that are linked directly or through
one other client, or linked pairs alone."""

MAX_DEVIATION = 0.02
SAME = 1e-6
"""Similarities that differ by less count as equal, because of float32 rounding."""


def instance_similarity(changes: NDArray[np.floating]) -> NDArray[np.float64]:
    """Cosine of every two clients' changes (CADIS, eq. 11): s, (clients, clients).

    `changes` are what training changed of each client's last dense layer, (clients, values),
    finite. A change of length 0 has similarity 0 to all.
    """
    changes = changes.astype(np.float64)
    lengths = np.linalg.norm(changes, axis=1, keepdims=True)
    directions = np.divide(changes, lengths, out=np.zeros_like(changes), where=lengths > 0)
    similarity: NDArray[np.float64] = (directions @ directions.T).clip(-1, 1)
    return similarity


@dataclass(frozen=True)
class KnownPairs:
    """Pairs of clients that took part in a round together, and their similarity.

    Memory grows with these pairs, not with all possible ones. Pair i < j has the key
    ``i * 2^32 + j``; keys ascend. ``sums`` and ``counts`` are those of s_ij over the pair's rounds,
    ``peaks`` the highest values so far of its mean.
    """

    keys: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    sums: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    counts: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    peaks: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

    @property
    def pairs(self) -> Pairs:
        """The clients i and j."""
        return self.keys >> 32, self.keys & 0xFFFFFFFF

    @property
    def similarity(self) -> NDArray[np.float64]:
        """S_ij of each pair: the mean over their common rounds (CADIS, eq. 12)."""
        return self.sums / self.counts

    def after(self, clients: NDArray[np.int64], similarity: NDArray[np.float64]) -> "KnownPairs":
        """The pairs after another round: ascending indices of its clients, and s between them."""
        upper = np.triu_indices(len(clients), 1)
        keys, new = (clients[upper[0]] << 32) | clients[upper[1]], similarity[upper]
        place = np.searchsorted(self.keys, keys)
        met = np.append(self.keys, -1)[place] == keys
        sums, counts = self.sums.copy(), self.counts.copy()
        sums[place[met]] += new[met]
        counts[place[met]] += 1
        place, keys, new = place[~met], keys[~met], new[~met]
        keys, sums = np.insert(self.keys, place, keys), np.insert(sums, place, new)
        counts = np.insert(counts, place, 1)
        peaks = np.maximum(np.insert(self.peaks, place, -1.0), sums / counts)
        return KnownPairs(keys, sums, counts, peaks)

    def judged(self, by: Judged) -> NDArray[np.float64]:
        """Similarity of each pair by which it is judged."""
        return self.peaks if by == "peak" else self.similarity

    def links(self, needed: float, by: Judged = "peak") -> Pairs:
        """Pairs whose similarity is above a threshold."""
        (i, j), alike = self.pairs, self.judged(by) > needed
        return i[alike], j[alike]

    def rows(
        self, clients: NDArray[np.int64], num_clients: int, by: Judged = "peak"
    ) -> NDArray[np.float64]:
        """Similarity of some clients to all, (clients, num_clients); NaN for unknown pairs."""
        row_of = np.full(num_clients, -1)
        row_of[clients] = np.arange(len(clients))
        rows = np.full((len(clients), num_clients), np.nan)
        (i, j), judged = self.pairs, self.judged(by)
        for own, other in ((i, j), (j, i)):
            wanted = row_of[own] >= 0
            rows[row_of[own[wanted]], other[wanted]] = judged[wanted]
        return rows


def transitive_similarity(
    rows: NDArray[np.float64], clients: NDArray[np.int64]
) -> tuple[Pairs, NDArray[np.float64], NDArray[np.float64]]:
    """Estimate the similarity of unknown pairs through clients that know both (CADIS).

    Client k estimates that of i and j as ``N(S_ik S_jk, sigma)`` with
    ``sigma = sqrt((1 - S_ik^2) (1 - S_jk^2))``, and counts if sigma < 0.02. The mean of such draws
    is normal too; its mean and deviation are returned.

    Parameters
    ----------
    rows : ndarray
        S of the clients i and k with all, (clients, num_clients), NaN if unknown; j is any.
    clients : ndarray
        Indices of these clients, ascending.

    Returns
    -------
    Pairs, ndarray, ndarray
        Pairs (i, j) with an estimate, each once; its mean; its standard deviation.
    """
    counts, means, variances = np.zeros((3, *rows.shape))
    unknown = np.isnan(rows)
    unknown[np.arange(len(clients)), clients] = False
    any_i, any_j = unknown.any(axis=1), unknown.any(axis=0)  # else known pairs cost as much
    for k, client in enumerate(clients):
        s_ik, s_jk = rows[:, client], rows[k]
        doubt_i, doubt_j = 1 - s_ik**2, 1 - s_jk**2  # comparisons with NaN (unknown) are False
        i = any_i & (doubt_i * np.nanmin(doubt_j, initial=1.0) < MAX_DEVIATION**2)
        j = any_j & (doubt_j * np.nanmin(doubt_i, initial=1.0) < MAX_DEVIATION**2)
        i, j = np.flatnonzero(i), np.flatnonzero(j)
        variance = np.outer(doubt_i[i], doubt_j[j])
        sure = variance < MAX_DEVIATION**2
        block = np.ix_(i, j)
        counts[block] += sure
        means[block] += sure * np.outer(s_ik[i], s_jk[j])
        variances[block] += sure * variance
    estimated = unknown & (counts > 0)
    estimated[:, clients] = np.triu(estimated[:, clients], 1)
    i, j = estimated.nonzero()
    return (
        (clients[i], j),
        means[estimated] / counts[estimated],
        np.sqrt(variances[estimated]) / counts[estimated],
    )


def threshold(
    server_round: int, first: float = 0.975, growth: float = 1.0005, last: float = 0.985
) -> float:
    """Threshold eps of a round, which rises from `first` to `last`.

    From ``eps_0 = first``, ``eps_{t+1} = min(eps_t growth^t, last)`` as in the authors' code; round
    1 is t = 0.
    """
    t = server_round - 1
    rising = math.log(first) + t * (t - 1) / 2 * math.log(growth)
    return math.exp(min(rising, math.log(last)))


def similarity_of_a_cluster(
    similarity: NDArray[np.float64], eps: float, rescaling: Rescaling = "pairs"
) -> float:
    """Similarity S above which two clients share a cluster (CADIS, eq. 13).

    They do if ``Q_ij > eps``, where Q is S rescaled to [0, 1] by the lowest and highest value. If
    these are equal, all clients share one cluster.
    """
    if rescaling == "positive":
        similarity = np.append(similarity[similarity > 0], 1.0)
    low, high = similarity.min(initial=1.0), similarity.max(initial=-1.0)
    return -np.inf if high - low < SAME else float(low + eps * (high - low))


def estimated_links(
    rows: NDArray[np.float64],
    clients: NDArray[np.int64],
    needed: float,
    generator: np.random.Generator,
) -> Pairs:
    """Draw which unknown pairs are similar enough; see :func:`transitive_similarity`."""
    (i, j), means, deviations = transitive_similarity(rows, clients)
    alike = generator.normal(means, deviations) > needed
    return i[alike], j[alike]


def clusters(num_clients: int, *linked: Pairs) -> NDArray[np.int64]:
    """Cluster of each client: the connected components of the linked pairs."""
    pairs = np.concatenate([np.stack(pairs) for pairs in linked], axis=1)
    graph = coo_array((np.ones(pairs.shape[1]), pairs), shape=(num_clients, num_clients))
    cluster_of: NDArray[np.int64] = connected_components(graph, directed=False)[1].astype(np.int64)
    return cluster_of


def cluster_sizes(
    cluster_of: NDArray[np.int64],
    linked: list[Pairs],
    closure: Closure,
    clients: NDArray[np.int64],
    counted: NDArray[np.int64],
) -> NDArray[np.int64]:
    """``|cluster of i|`` (CADIS, eq. 1): how many of the `counted` clients share i's cluster.

    Parameters
    ----------
    cluster_of, linked : ndarray, list of Pairs
        Cluster of each client by `clusters`, (clients,), and the pairs that made it.
    closure : str
        Who shares a cluster; anything but ``full`` gives clusters that overlap.
    clients : ndarray
        Indices of the clients i whose clusters are measured; each is one of `counted`.
    counted : ndarray
        Indices of the clients that count.
    """
    if closure == "full":
        sizes: NDArray[np.int64] = np.bincount(cluster_of[counted])[cluster_of[clients]]
        return sizes
    itself = np.arange(len(cluster_of))
    i, j = np.concatenate([np.stack(pairs) for pairs in [*linked, (itself, itself)]], axis=1)
    shape = (len(cluster_of), len(cluster_of))
    together = coo_array((np.ones(2 * len(i)), (np.append(i, j), np.append(j, i))), shape).tocsr()
    if closure == "one-step":
        together = together @ together
    members: NDArray[np.int64] = (together[clients][:, counted] > 0).sum(axis=1)
    return members


def aggregation_weights(
    cluster_of: NDArray[np.int64],
    num_examples: NDArray[np.floating],
    most_say: float = math.inf,
    sizes: NDArray[np.int64] | None = None,
) -> NDArray[np.float64]:
    """Weights ``u_i ~ 1/|cluster of i| n_i/n``, which sum to 1 (CADIS, eq. 1-2).

    Parameters
    ----------
    cluster_of, num_examples : ndarray
        Cluster and samples of each client of the round, (clients,).
    most_say : float (default: inf)
        Cap that is not the paper's: a cluster weighs at most that many times its share of the
        clients; what is above goes to the others in proportion. At least 1.
    sizes : ndarray, optional (default: None)
        ``|cluster of i|`` of each client; None counts these clients.
    """
    weights = num_examples / (np.bincount(cluster_of)[cluster_of] if sizes is None else sizes)
    _, cluster = np.unique(cluster_of, return_inverse=True)
    say = np.bincount(cluster, weights) / weights.sum()
    most = most_say * np.bincount(cluster) / len(cluster)
    capped = np.zeros(len(say), dtype=bool)
    while (over := ~capped & (say > most * (1 + 1e-9))).any():
        capped |= over
        say[capped] = most[capped]
        left = 1 - say[capped].sum()
        if not capped.all():
            say[~capped] *= left / say[~capped].sum()
    inside: NDArray[np.float64] = say[cluster] * weights / np.bincount(cluster, weights)[cluster]
    return inside
