"""The partition schemes."""

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flwr_distill.task.errors import ReportedError
from flwr_distill.task.text_files import read_text

if TYPE_CHECKING:
    from flwr_datasets.partitioner import Partitioner

Indices = NDArray[np.int64]
SEVERAL = "12:5:3"
ONE_MAIN = "6:1:1:1:1"
MAX_UNITS = 5
MAX_DRAWS = 10_000
"""Of a class's shares, until all nodes have enough of it."""
MAX_NUMBERS, MAX_BATCHES = 1_000_000, 20
"""Shares that are drawn at a time while nodes are empty, and how often."""


class PartitionError(ReportedError, ValueError):
    """A partition is not possible."""


@dataclass(frozen=True)
class Request:
    """Arguments of :func:`task.partition.partition_indices`."""

    labels: Indices
    num_partitions: int
    classes_per_node: int
    alpha: float
    clusters: str
    seed: int
    index_file: str | Path | None
    samples: str = ""
    spread: float = 0.0
    min_of_a_class: int = 0

    def available(self) -> tuple[Indices, Indices]:
        """Classes in the data, and the number of samples of each."""
        return np.unique(self.labels, return_counts=True)

    def deal(self, counts: NDArray[np.int64]) -> list[Indices]:
        """Give each node its number of random samples per class: counts (nodes, classes)."""
        rng = np.random.default_rng(self.seed)
        parts: list[list[Indices]] = [[] for _ in counts]
        for label, wanted in zip(self.available()[0], counts.T, strict=True):
            samples = rng.permutation(np.flatnonzero(self.labels == label))
            *shares, _ = np.split(samples, wanted.cumsum())
            for part, share in zip(parts, shares, strict=True):
                part.append(share)
        return [np.concatenate(shares) for shares in parts]

    def checked_alpha(self, remedy: str) -> float:
        """`alpha`, which must be positive and finite."""
        if not 0 < self.alpha < np.inf:
            raise PartitionError(
                "must be > 0", where="partition.alpha", value=self.alpha, remedy=remedy
            )
        return float(self.alpha)


# Few classes per node, by rule or by a power law


def pathological(request: Request) -> list[Indices]:
    """Give node i the classes ``(i * C + k) mod K``, each split equally among its nodes.

    Blocks of classes repeat, so several nodes have equal label distributions; all classes are used
    if nodes * C >= K. flwr-datasets only has overlapping or random assignments.
    """
    classes, _ = request.available()
    nodes, per_node = request.num_partitions, checked_classes(request, len(classes))
    node_classes = np.arange(nodes * per_node).reshape(nodes, per_node) % len(classes)
    has = np.zeros((nodes, len(classes)), dtype=np.int64)
    has[np.arange(nodes)[:, None], node_classes] = 1
    return request.deal(_equal_shares(request, has))


def label_quantity(request: Request) -> list[Indices]:
    """Give node i class ``i mod K`` and C - 1 random others, each split equally among its nodes.

    Classes of nodes overlap, so there are many label distributions (quantity-based label imbalance,
    Li et al. 2022, section IV-A). Nodes of frequently drawn classes have fewer samples.
    """
    classes, _ = request.available()
    per_node = checked_classes(request, len(classes))
    rng = np.random.default_rng([request.seed, 1])
    has = np.zeros((request.num_partitions, len(classes)), dtype=np.int64)
    for node, row in enumerate(has):
        own = node % len(classes)
        others = np.delete(np.arange(len(classes)), own)
        row[[own, *rng.choice(others, per_node - 1, replace=False)]] = 1
    return request.deal(_equal_shares(request, has))


def _equal_shares(request: Request, has: NDArray[np.int64]) -> NDArray[np.int64]:
    """Samples of each class on each node, by who has which class: has (nodes, classes)."""
    _, counts = request.available()
    share, rest = np.divmod(counts, _nodes_per_class(request, has).clip(1))
    first = has.cumsum(axis=0) <= rest  # these nodes get one sample more
    shares: NDArray[np.int64] = has * (share + first)
    return shares


def pareto(request: Request) -> list[Indices]:
    """Split each class among nodes whose sizes follow a power law (CADIS's PA).

    Node i has C random classes; all classes have equally many nodes. The nodes of a class get one
    sample each, and shares of the others in proportion to u_i, drawn from a Pareto distribution,
    ``P(u_i > x) = x^-alpha``.
    """
    alpha = request.checked_alpha("0.5 for sizes from few samples to thousands, 5 for similar ones")
    classes, counts = request.available()
    per_node = checked_classes(request, len(classes))
    rng = np.random.default_rng([request.seed, 1])
    has = np.zeros((request.num_partitions, len(classes)), dtype=np.int64)
    for row in has:
        fewest_first = np.lexsort((rng.random(len(classes)), has.sum(axis=0)))
        row[fewest_first[:per_node]] = 1
    spare = counts - _nodes_per_class(request, has)
    weights = has * (1 + rng.pareto(alpha, (request.num_partitions, 1)))
    shares = weights / weights.sum(axis=0).clip(1)
    return request.deal(has + (shares * spare).astype(np.int64))


def checked_classes(request: Request, num_classes: int) -> int:
    """Classes per node; PartitionError if the data have fewer."""
    if not 1 <= request.classes_per_node <= num_classes:
        raise PartitionError(
            f"must be 1 to {num_classes}, the number of classes in the data",
            where="partition.classes",
            value=request.classes_per_node,
        )
    return request.classes_per_node


def _nodes_per_class(request: Request, has: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number of nodes that have each class; at most the class's samples."""
    nodes: NDArray[np.int64] = has.sum(axis=0)
    for label, count, number in zip(*request.available(), nodes, strict=True):
        if count < number:
            raise PartitionError(
                f"class {label} has {count} samples for its {number} nodes",
                where="partition.classes",
                value=request.classes_per_node,
                remedy=f"lower it, or num-partitions, which is {request.num_partitions}",
            )
    return nodes


# Cluster skew (CADIS): the nodes of a cluster have the same classes.
#
# Consecutive nodes form clusters by ratio; consecutive classes form as many blocks, as equal as
# possible. The paper's main cluster has 60 % of the nodes; four equal other clusters, the ratio of
# MC and the units of UC are our choice. The authors' published splits are more like class_pairs.


def multi_cluster(request: Request) -> list[Indices]:
    """MC: several clusters of unequal sizes, equally many samples per node."""
    return request.deal(_balanced(request, SEVERAL))


def balanced_cluster(request: Request) -> list[Indices]:
    """BC: one main cluster of 60 % of the nodes, equally many samples per node."""
    return request.deal(_balanced(request, ONE_MAIN))


def unbalanced_cluster(request: Request) -> list[Indices]:
    """UC: the clusters of BC; a node has 1 to 5 units of samples, drawn, of each of its classes.

    The unit is the largest that all classes have enough samples for.
    """
    classes, counts = request.available()
    rng = np.random.default_rng([request.seed, 1])
    units = np.zeros((request.num_partitions, len(classes)), dtype=np.int64)
    for nodes, block in nodes_and_classes(request, ONE_MAIN):
        units[nodes, block] = rng.integers(1, MAX_UNITS + 1, units[nodes, block].shape)
    unit = int((counts // units.sum(axis=0)).min())
    return request.deal(_enough(unit, request) * units)


def _balanced(request: Request, ratio: str) -> NDArray[np.int64]:
    """Samples of each class on each node, with equal totals.

    Nodes of a cluster take samples of its c classes in turn, which keeps classes balanced: of the
    first t samples, ``ceil((t - k) / c)`` are of class k.
    """
    classes, counts = request.available()
    clusters = nodes_and_classes(request, ratio)
    limits = []
    for nodes, block in clusters:
        own = counts[block]
        limits.append((len(own) * own + np.arange(len(own))).min() // (nodes.stop - nodes.start))
    each = _enough(int(min(limits)), request)
    sample_counts = np.zeros((request.num_partitions, len(classes)), dtype=np.int64)
    for nodes, block in clusters:
        num_classes = block.stop - block.start
        turns = np.arange(nodes.stop - nodes.start + 1)[:, None] * each - np.arange(num_classes)
        sample_counts[nodes, block] = np.diff(-(-turns // num_classes), axis=0)
    return sample_counts


def nodes_and_classes(request: Request, ratio: str) -> list[tuple[slice, slice]]:
    """Nodes and classes (by position) of each cluster; PartitionError if one would have none."""
    ratio = request.clusters or ratio
    shares = np.array([int(part) if part.isdecimal() else 0 for part in ratio.split(":")])
    num_classes = len(request.available()[0])
    limit = min(request.num_partitions, num_classes)
    if len(shares) > limit or not shares.all():
        raise PartitionError(
            f"must be 1 to {limit} sizes >= 1: each cluster needs at least one of "
            f"{request.num_partitions} nodes and of {num_classes} classes",
            where="partition.clusters",
            value=ratio,
            remedy="as in 12:5:3",
        )
    ideal_sizes = request.num_partitions * shares / shares.sum()
    sizes = np.ones_like(shares)
    for _ in range(request.num_partitions - len(shares)):
        sizes[np.argmax(ideal_sizes - sizes)] += 1
    blocks = np.array_split(np.arange(num_classes), len(shares))
    return [
        (slice(end - size, end), slice(block[0], block[-1] + 1))
        for size, end, block in zip(sizes, sizes.cumsum(), blocks, strict=True)
    ]


def _enough(samples: int, request: Request) -> int:
    if not samples:
        raise PartitionError(
            f"{len(request.labels)} samples are too few for clusters of {request.num_partitions} "
            "nodes, which share the same few classes",
            where="partition.scheme",
            remedy="use fewer nodes",
        )
    return samples


# A published split


def index_file(request: Request) -> list[Indices]:
    """Read a JSON file, client id -> list of sample indices."""
    if request.index_file is None:
        raise PartitionError(
            "needs the path of a JSON file with client id -> list of sample indices",
            where="partition.index-file",
        )
    path = Path(request.index_file)
    clients = _read_clients(path)
    expected = {str(node) for node in range(request.num_partitions)}
    if set(clients) != expected:
        missing, surplus = sorted(expected - set(clients)), sorted(set(clients) - expected)
        raise PartitionError(
            f"client ids must be 0 to {request.num_partitions - 1}, one for each node; "
            f"missing: {missing[:5]}, surplus: {surplus[:5]}",
            where=path,
        )
    parts = [
        _checked_indices(clients[str(node)], len(request.labels), f"{path}, client {node}")
        for node in range(request.num_partitions)
    ]
    samples, counts = np.unique(np.concatenate(parts), return_counts=True)
    if (counts > 1).any():
        raise PartitionError(
            f"samples are listed more than once: {samples[counts > 1][:5].tolist()}",
            where=path,
            remedy="give each to one client",
        )
    return parts


def _read_clients(path: Path) -> dict[str, object]:
    try:
        content = json.loads(read_text(path), object_pairs_hook=_each_once)
    except (OSError, ValueError, RecursionError) as error:
        raise PartitionError(
            f"cannot be read as JSON ({error})", where="partition.index-file", value=str(path)
        ) from error
    if isinstance(content, dict) and len(content) == 1:
        (nested,) = content.values()
        content = nested if isinstance(nested, dict) else content
    if not isinstance(content, dict):
        raise PartitionError("need a JSON object, client id -> list of sample indices", where=path)
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
        raise PartitionError("needs a list of whole numbers, its sample indices", where=where)
    if outside := [index for index in indices if not 0 <= index < num_samples]:
        raise PartitionError(
            f"lists samples {outside[:5]}, but the {num_samples} samples are numbered 0 to "
            f"{num_samples - 1}",
            where=where,
        )
    return np.array(indices, dtype=np.int64)


# flwr-datasets' partitioners


def iid(request: Request) -> list[Indices]:
    """Equal shares of the shuffled samples."""
    return _run(_partitioners().IidPartitioner(request.num_partitions), request)


def dirichlet(request: Request) -> list[Indices]:
    """Each class split by proportions from Dirichlet(alpha).

    They are redrawn while a node is empty; or with a bound, those of each class until all nodes
    have enough of it.
    """
    alpha = request.checked_alpha("try 0.1 for strong label skew")
    if request.min_of_a_class:
        return request.deal(_bounded_shares(request, alpha))
    partitioner = _partitioners().DirichletPartitioner(
        request.num_partitions,
        partition_by="label",
        alpha=alpha,
        min_partition_size=1,
        seed=request.seed,
    )
    try:
        return _run(partitioner, request)
    except ValueError:  # after ten draws
        return request.deal(_nowhere_empty_shares(request, alpha))


def _nowhere_empty_shares(request: Request, alpha: float) -> NDArray[np.int64]:
    """Samples of each class on each node, int64 (nodes, classes), of the first draw that will do.

    Of two classes over 20 nodes by an alpha of 0.1, a few draws in 10,000 leave no node empty.
    """
    rng, nodes = np.random.default_rng([request.seed, 2]), request.num_partitions
    _, counts = request.available()
    draws = max(1, MAX_NUMBERS // (len(counts) * nodes))
    for _ in range(MAX_BATCHES):
        shares = rng.dirichlet(np.full(nodes, alpha), (draws, len(counts)))
        ends = np.rint(shares.cumsum(axis=2) * counts[:, None]).astype(np.int64)
        sizes = np.diff(ends, axis=2, prepend=0)
        whole = np.flatnonzero(sizes.sum(axis=1).min(axis=1))
        if len(whole):
            first: NDArray[np.int64] = sizes[whole[0]].T
            return first
    raise PartitionError(
        f"left some of {nodes} nodes without samples in every draw",
        where="partition.alpha",
        value=request.alpha,
        remedy="raise it, use fewer nodes or change the seed",
    )


def _bounded_shares(request: Request, alpha: float) -> NDArray[np.int64]:
    """Samples of each class on each node, int64 (nodes, classes), none below the bound."""
    rng, least = np.random.default_rng([request.seed, 1]), request.min_of_a_class
    columns = []
    for label, count in zip(*request.available(), strict=True):
        shares = rng.dirichlet(np.full(request.num_partitions, alpha), MAX_DRAWS)
        ends = np.rint(shares.cumsum(axis=1) * count).astype(np.int64)
        sizes = np.diff(ends, axis=1, prepend=0)
        enough = np.flatnonzero(sizes.min(axis=1) >= least)
        if not len(enough):
            raise PartitionError(
                f"no draw gives each of {request.num_partitions} nodes as many of the {count} "
                f"samples of class {label}",
                where="partition.min-of-a-class",
                value=least,
                remedy="lower it, raise partition.alpha, or use fewer nodes",
            )
        columns.append(sizes[enough[0]])
    return np.stack(columns, axis=1)


def shards(request: Request) -> list[Indices]:
    """Some shards per node of the samples sorted by label; a rest may stay unused."""
    limit = len(request.labels) // request.num_partitions
    if not 1 <= request.classes_per_node <= limit:
        raise PartitionError(
            f"must be 1 to {limit} for shards of {len(request.labels)} samples on "
            f"{request.num_partitions} nodes",
            where="partition.classes",
            value=request.classes_per_node,
        )
    partitioner = _partitioners().ShardPartitioner(
        request.num_partitions,
        partition_by="label",
        num_shards_per_partition=request.classes_per_node,
        seed=request.seed,
    )
    return _run(partitioner, request)


def _partitioners() -> Any:
    try:
        from flwr_datasets import partitioner
    except ImportError as error:
        raise PartitionError(
            "iid, dirichlet and shards need flwr-datasets",
            where="partition.scheme",
            remedy="pip install 'flwr-distill[partitions]', on the nodes",
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
