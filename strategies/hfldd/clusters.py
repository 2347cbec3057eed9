"""HFLDD's clusters: how they form, and how they change as nodes come and go."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import zip_longest
from logging import INFO, WARNING
from typing import Any

import numpy as np
from flwr.common import log
from numpy.typing import NDArray

from flwr_distill.base.text import counted, listed
from flwr_distill.strategies.common.retries import Retries
from flwr_distill.strategies.common.topology import Cluster, Topology, successor
from flwr_distill.strategies.hfldd.clustering import (
    cluster_to_join,
    heterogeneous_clusters,
    homogeneous_groups,
    kl_matrix,
    nearest_group,
)

GOLDEN_RATIO = (5**0.5 - 1) / 2


@dataclass
class LiveCluster:
    """A cluster as nodes come and go."""

    nodes: list[int]
    """In the order of joining. A node's position is its rank, which orders the head's virtual data,
    so disconnected nodes stay in the list."""
    head: int
    """The node that trains."""
    held: dict[int, list[int]] = field(default_factory=dict)
    """For each past or present head, the nodes whose virtual data it has."""
    verdicts: dict[int, dict[int, bool]] = field(default_factory=dict)
    """For each of them, of which nodes' virtual data it was decided whether they are excluded."""

    @property
    def held_by_head(self) -> list[int]:
        """The nodes whose virtual data the head has."""
        return list(self.held.get(self.head, ()))

    @property
    def undecided(self) -> list[int]:
        """The nodes whose virtual data the head has, and that nobody has judged."""
        judged = self.verdicts.get(self.head, {})
        return [node for node in self.held_by_head if node not in judged]

    @property
    def left_out(self) -> list[int]:
        """The nodes whose virtual data the head is to leave out."""
        judged = self.verdicts.get(self.head, {})
        return [node for node in self.nodes if judged.get(node)]

    def ranks(self, nodes: Iterable[int]) -> list[int]:
        """Ranks of nodes of the cluster."""
        return [self.nodes.index(node) for node in nodes]

    def received(self, nodes: Collection[int]) -> None:
        """Note that the head got these nodes' virtual data; who was voted out stays out."""
        held = self.held.setdefault(self.head, [])
        held.extend(node for node in nodes if node not in held)
        judged = self.verdicts.get(self.head, {})
        for node in nodes:
            if judged.get(node) is False:
                del judged[node]

    def lost(self, head: int) -> None:
        """Note that a head no longer has its members' virtual data."""
        self.held[head] = []
        self.verdicts.pop(head, None)

    def rename(self, node: int, new: int) -> None:
        """Give a node its new id, under which it has kept nothing that others sent."""
        self.held.pop(node, None)
        self.verdicts.pop(node, None)
        self.nodes = _renamed(self.nodes, node, new)
        self.head = new if self.head == node else self.head
        self.held = {head: _renamed(nodes, node, new) for head, nodes in self.held.items()}
        for judged in self.verdicts.values():
            if node in judged:
                judged[new] = judged.pop(node)


def _renamed(nodes: Sequence[int], node: int, new: int) -> list[int]:
    return [new if one == node else one for one in nodes]


class Clusters:
    """All clusters, and the homogeneous groups they were drawn from; empty until formed.

    Attributes
    ----------
    failed : set[int]
        Heads to be replaced: they did not train, or lost virtual data twice.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.failed: set[int] = set()
        self._as_heads = Retries()
        self._losers: set[int] = set()
        self._clusters: list[LiveCluster] = []
        self._groups: list[list[int]] = []
        self._group_means: NDArray[np.floating] = np.empty((0, 0, 0))

    def __iter__(self) -> Iterator[LiveCluster]:
        return iter(self._clusters)

    def __len__(self) -> int:
        return len(self._clusters)

    @property
    def nodes(self) -> list[int]:
        """All nodes that are in a cluster."""
        return [node for cluster in self for node in cluster.nodes]

    def by_head(self) -> dict[int, LiveCluster]:
        """Each cluster by its head."""
        return {cluster.head: cluster for cluster in self}

    def by_node(self) -> dict[int, LiveCluster]:
        """Each node's cluster."""
        return {node: cluster for cluster in self for node in cluster.nodes}

    def virtual_data_of(self, head: int) -> list[int]:
        """Nodes whose virtual data a past or present head has."""
        return list(self.by_node()[head].held.get(head, ()))

    @property
    def label_shape(self) -> tuple[int, ...]:
        """Shape of every node's soft labels, (|D_g|, classes)."""
        return self._group_means.shape[1:]

    @property
    def topology(self) -> Topology:
        """The current clusters."""
        clusters = (
            Cluster(one.head, tuple(node for node in one.nodes if node != one.head)) for one in self
        )
        return Topology(tuple(clusters), tuple(tuple(group) for group in self._groups))

    def form(
        self,
        soft_labels: Mapping[int, NDArray[Any]],
        groups: int | None,
        noise: Mapping[int, float] | None = None,
        *,
        complete: bool = False,
        differing: bool = False,
    ) -> None:
        """Steps 2 and 3: homogeneous groups, heterogeneous clusters, and a head for each.

        `noise` is the divergence between two halves of a node's own data, see
        `homogeneous_groups`; for nodes that do not report theirs the others' median counts. Where
        the nodes' classes are known to be `differing`, they are at least two groups: as one, each
        would be a cluster of its own.
        """
        nodes = list(soft_labels)  # not an array: 64-bit ids would become floats
        stacked = np.stack(list(soft_labels.values()))
        usual = float(np.median(list(noise.values()))) if noise else 0.0
        group_of = homogeneous_groups(
            kl_matrix(stacked),
            groups,
            self.seed,
            least=2 if differing else 1,
            most=stacked.shape[-1],  # so many nodes suffice for all classes
            noise=np.array([noise.get(node, usual) for node in nodes]) if noise else None,
        )
        num_groups = int(group_of.max()) + 1
        if groups is not None and num_groups < groups:
            distinct = counted(num_groups, "distinct node")
            log(WARNING, "hfldd.groups = %d lowered to %s", groups, distinct)
        generator = np.random.default_rng(self.seed)
        for cluster in heterogeneous_clusters(group_of, generator, complete=complete):
            head = nodes[int(generator.choice(cluster))]
            self._clusters.append(LiveCluster([nodes[i] for i in cluster], head))
        of_group = [np.flatnonzero(group_of == group) for group in range(num_groups)]
        self._groups = [[nodes[i] for i in members] for members in of_group]
        self._group_means = np.stack([stacked[members].mean(axis=0) for members in of_group])
        sizes = [len(cluster.nodes) for cluster in self]
        words = counted(num_groups, "group"), counted(len(self), "cluster")
        log(INFO, "HFLDD: %s, %s of sizes %s", *words, listed([str(size) for size in sizes]))
        if len(nodes) > 1 and max(sizes) == 1:
            log(
                WARNING,
                "HFLDD: each node is a cluster of its own and nothing is distilled, as %s (set "
                'hfldd.groups, or take another strategy, such as "fedavg")',
                "the nodes' labels look alike" if num_groups == 1 else "few nodes are connected",
            )

    def missing_classes(self, held: Mapping[int, Collection[int] | None]) -> dict[int, list[int]]:
        """Classes that other clusters' nodes have and a cluster's do not, by head.

        `held` are each node's classes; empty if any node does not say which (None).
        """
        if any(classes is None for classes in held.values()):
            return {}
        of_cluster = {
            cluster.head: {label for node in cluster.nodes for label in held[node] or ()}
            for cluster in self
        }
        everywhere = set().union(*of_cluster.values())
        missing = {head: sorted(everywhere - own) for head, own in of_cluster.items()}
        return {head: classes for head, classes in missing.items() if classes}

    def not_placed(self, nodes: Iterable[int]) -> list[int]:
        """The nodes that are in no cluster."""
        placed = self.by_node()
        return [node for node in nodes if node not in placed]

    def restore_places(
        self, new: Iterable[int], connected: Collection[int], data: Callable[[int], str]
    ) -> list[int]:
        """Give nodes that are back under a new id their places; return the others.

        They are known by their `data`; under two ids, heads would have their virtual data twice.
        """
        gone = {data(node): node for node in self.nodes if node not in connected}
        others = []
        for node in new:
            known = gone.pop(data(node), None) if data(node) else None
            if known is None:
                others.append(node)
                continue
            self.by_node()[known].rename(known, node)
            self._groups = [_renamed(group, known, node) for group in self._groups]
            log(INFO, "HFLDD: node %d is back as node %d", known, node)
        return others

    def place(self, node: int, soft_labels: NDArray[Any]) -> None:
        """Have a new node join a cluster."""
        group = self._groups[nearest_group(soft_labels, self._group_means)]
        joined = cluster_to_join([cluster.nodes for cluster in self], group)
        self._clusters[joined].nodes.append(node)
        group.append(node)
        log(INFO, "HFLDD: node %d joins cluster %d", node, joined)

    def replace_heads(self, server_round: int, connected: Set[int]) -> None:
        """Replace heads that disconnected or failed by other nodes of their clusters."""
        for node in self.failed:
            self._as_heads.failed(node, server_round)
        for place, cluster in enumerate(self):
            if cluster.head in connected - self.failed:
                continue
            able = [node for node in cluster.nodes if node in connected and node != cluster.head]
            generator = np.random.default_rng([self.seed, server_round, place])
            head = successor(cluster.head, able, partial(self._with_fewest_failures, generator))
            if head is not None:
                cluster.head = head

    def rotate_heads(
        self, server_round: int, connected: Set[int], samples: Mapping[int, int]
    ) -> None:
        """Have another node of each cluster be its head, each as often as it has `samples`.

        One that failed as head has no turn for 1, 2, 4 ... rounds, unless all others have none.
        A point goes along the row of all samples of a cluster by the golden ratio, again from the
        start where it ends, which leaves out no part for long. Clusters begin at even distances, so
        that nodes of different groups train at a time.
        """
        for place, cluster in enumerate(self):
            able = [node for node in cluster.nodes if node in connected - self.failed]
            if able:
                due = [node for node in able if self._as_heads.due(node, server_round)]
                able = due or self._failed_least(able)
                ends = np.cumsum([samples.get(node, 1) for node in able])
                point = (place / len(self) + server_round * GOLDEN_RATIO) % 1
                cluster.head = able[int(np.searchsorted(ends, point * ends[-1], side="right"))]

    def turns(self, nodes: Collection[int]) -> Iterator[None]:
        """Make one node after the other of each cluster its head, of those among `nodes`."""
        rows = [[node for node in cluster.nodes if node in nodes] for cluster in self]
        for heads in zip_longest(*rows):
            for cluster, head in zip(self, heads, strict=True):
                if head is not None:
                    cluster.head = head
            yield

    def lost(self, head: int) -> None:
        """Note that a head lost its members' virtual data.

        It is replaced if that has happened before, or one head could have them sent every round.
        """
        self.by_node()[head].lost(head)
        if head in self._losers:
            self.failed.add(head)
        self._losers.add(head)

    def forget_other_heads(self) -> None:
        """Note that earlier heads' virtual data are outdated."""
        for cluster in self:
            cluster.held = {cluster.head: cluster.held_by_head}

    def _with_fewest_failures(self, generator: np.random.Generator, able: Sequence[int]) -> int:
        candidates = self._failed_least(able)
        return candidates[generator.integers(len(candidates))]

    def _failed_least(self, able: Sequence[int]) -> list[int]:
        fewest = min(map(self._as_heads.failures, able))
        return [node for node in able if self._as_heads.failures(node) == fewest]

    def members(self, connected: Set[int]) -> dict[int, LiveCluster]:
        """Connected nodes with a connected head, and their clusters."""
        return {
            node: cluster
            for cluster in self
            for node in cluster.nodes
            if {node, cluster.head} <= connected and node != cluster.head
        }

    def missing(self, connected: Set[int]) -> dict[int, LiveCluster]:
        """Those of `members` whose virtual data the head is missing."""
        members = self.members(connected).items()
        return {node: cluster for node, cluster in members if node not in cluster.held_by_head}

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {
            "clusters": [asdict(cluster) for cluster in self],
            "groups": self._groups,
            "group-means": self._group_means,
            "failed": sorted(self.failed),
            "failures": self._as_heads.state_dict(),
            "losers": sorted(self._losers),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        self._clusters = [LiveCluster(**cluster) for cluster in state["clusters"]]
        self._groups = state["groups"]
        self._group_means = state["group-means"]
        self.failed = set(state["failed"])
        self._as_heads = Retries(state["failures"])
        self._losers = set(state["losers"])
