"""Nodes of FedHEAD's sectors: which are connected, where each belongs, and which leads."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from logging import WARNING
from typing import Any

import numpy as np
from flwr.common import log
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flwr_distill.links.records import LinkMode
from flwr_distill.links.routes import Links
from flwr_distill.protocol.replies import NothingUsableError
from flwr_distill.strategies.common.directory import Description, Directory
from flwr_distill.strategies.common.robust import limited
from flwr_distill.strategies.common.topology import Cluster
from flwr_distill.strategies.common.waiting import connected_nodes


class Membership:
    """Nodes in sectors, as they come and go; parameters as of `strategies.fedhead.FedHEAD`.

    A node's identity is its partition, or its id if it has none: unlike ids, partitions survive
    restarts of a node.

    Parameters
    ----------
    evenly : bool (default: False)
        Whether all nodes of a sector lead as often, whatever number of samples they claim, and
        claims count at most as `strategies.common.robust.limited` says.

    Attributes
    ----------
    failed : set[int]
        Identities of leaders that failed since it was last emptied.
    distrusted : set[int]
        Nodes that sent what cannot be a mean of their sector; they lead no more. By id: a partition
        is only what a node claims, and another must not lose its place by it.
    """

    def __init__(
        self,
        num_sectors: int,
        fixed_leader: bool,
        seed: int,
        directory: Directory,
        evenly: bool = False,
    ) -> None:
        self.num_sectors = num_sectors
        self.fixed_leader = fixed_leader
        self.seed = seed
        self.evenly = evenly
        self.failed: set[int] = set()
        self.distrusted: set[int] = set()
        self._directory = directory
        self._nodes: dict[int, Description] = {}
        self._sector_of: dict[int, int] = {}  # by identity

    def meet(self, grid: Grid, min_nodes: int, timeout: float) -> list[int]:
        """Ids of connected nodes that can take part, by identity; each new one gets a sector.

        Waits for `min_nodes` before the first sectors are formed, later for one. Raises
        TooFewNodesError if there are fewer within `timeout` seconds, NothingUsableError if none can
        take part.
        """
        nodes = connected_nodes(grid, 1 if self._nodes else min_nodes, timeout)
        declared: dict[int, int | None] = {}
        for node, description in self._directory.look_up(grid, nodes, timeout).items():
            if node in self._nodes or description.missing:  # the directory has logged it
                continue
            if description.introduction is None or not description.num_examples:
                log(WARNING, "Node %d cannot take part: it has no samples, or no links", node)
                continue
            self._nodes[node] = description
            declared[self.identity(node)] = description.sector
        self._sector_of = assign_sectors(
            {identity: declared[identity] for identity in sorted(declared)},
            self.num_sectors,
            np.random.default_rng(self.seed),
            self._sector_of,
        )
        able = [node for node in nodes if node in self._nodes]
        if not able:
            raise NothingUsableError(f"no node of {len(nodes)} can take part")
        return sorted(able, key=lambda node: (self.identity(node), node))

    def identity(self, node: int) -> int:
        """A node's partition, or its id if it has none."""
        partition = self._nodes[node].partition
        return node if partition is None else partition

    def num_examples(self, nodes: Iterable[int]) -> dict[int, int]:
        """Samples of nodes that count; see `Directory.samples`, and `evenly`."""
        samples = self._directory.samples(nodes)
        if not self.evenly:
            return samples
        counts = limited(np.array(list(samples.values()), dtype=np.float64))
        return {node: max(1, int(count)) for node, count in zip(samples, counts, strict=True)}

    def leading(self, num_examples: Mapping[int, int]) -> dict[int, int]:
        """Weights by which nodes come to lead: their samples that count, or 1 each."""
        return dict.fromkeys(num_examples, 1) if self.evenly else dict(num_examples)

    def without_address(self, nodes: Iterable[int]) -> set[int]:
        """Identities of nodes that no other node can send to directly."""
        introductions = {node: self._nodes[node].introduction for node in nodes}
        return {self.identity(n) for n, i in introductions.items() if i is None or not i.address}

    def links(self, mode: LinkMode) -> Links:
        """Routes between all known nodes."""
        introductions = {n: d.introduction for n, d in self._nodes.items() if d.introduction}
        return Links(introductions, mode)

    def codecs(self, nodes: Iterable[int]) -> list[tuple[str, ...]]:
        """Codecs of each of these nodes."""
        return [self._nodes[node].codecs for node in nodes]

    def draw_clusters(
        self, nodes: list[int], server_round: int, barred: Collection[int]
    ) -> tuple[Cluster, ...]:
        """Draw a leader in each sector, barred identities only if there is no other node.

        A sector of distrusted nodes alone takes no part.
        """
        generator = np.random.default_rng([self.seed, server_round])
        leading = self.leading(self.num_examples(nodes))
        clusters = []
        sector_of = {node: self._sector_of[self.identity(node)] for node in nodes}
        for sector in sorted(set(sector_of.values())):
            inside = [node for node in nodes if sector_of[node] == sector]
            trusted = [node for node in inside if node not in self.distrusted]
            if not trusted:
                log(WARNING, "Sector %d takes no part: nobody in it is trusted to lead it", sector)
                continue
            able = [node for node in trusted if self.identity(node) not in barred] or trusted
            sizes = np.array([leading[node] for node in able])
            place = int(sizes.argmax()) if self.fixed_leader else draw_leader(sizes, generator)
            members = tuple(node for node in inside if node != able[place])
            clusters.append(Cluster(head=able[place], members=members))
        return tuple(clusters)

    def narrow_leaders(self, clusters: Iterable[Cluster], least: float) -> list[int]:
        """Leaders with less than a share `least` of their sector's classes, as described."""
        narrow = []
        for cluster in clusters:
            held = [self._nodes[node].classes for node in (cluster.head, *cluster.members)]
            in_sector = {label for classes in held for label in classes or ()}
            if held[0] is not None and len(set(held[0])) < least * len(in_sector):
                narrow.append(cluster.head)
        return narrow

    def fail(self, *nodes: int) -> None:
        """Note that nodes failed."""
        self.failed.update(self.identity(node) for node in nodes)

    def distrust(self, node: int) -> None:
        """Note that a node lied as a leader."""
        self.distrusted.add(node)

    def has_failed(self, node: int) -> bool:
        """Whether a node failed since `failed` was last emptied, or lied as a leader."""
        return node in self.distrusted or self.identity(node) in self.failed

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {
            "sector-of": dict(self._sector_of),
            "failed": sorted(self.failed),
            "distrusted": sorted(self.distrusted),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        self._sector_of = dict(state["sector-of"])
        self.failed = set(state["failed"])
        self.distrusted = set(state["distrusted"])


def assign_sectors(
    declared: Mapping[int, int | None],
    num_sectors: int,
    generator: np.random.Generator,
    known: Mapping[int, int] | None = None,
) -> dict[int, int]:
    """Sector of each node in ``declared`` or ``known``.

    A node stays in its known sector, or goes to the one that its owner declares. The others, in
    random order, join the smallest sector; without sectors, the smallest of `num_sectors` new ones,
    which are never more than nodes.
    """
    sector_of = dict(known or {})
    sector_of.update({n: s for n, s in declared.items() if s is not None and n not in sector_of})
    rest = [node for node in declared if node not in sector_of]
    sectors = sorted(set(sector_of.values())) or list(range(min(num_sectors, len(rest))))
    sizes = Counter(sector_of.values())
    for i in generator.permutation(len(rest)):
        smallest = min(sectors, key=lambda sector: (sizes[sector], sector))
        sector_of[rest[i]] = smallest
        sizes[smallest] += 1
    return sector_of


def draw_leader(num_examples: NDArray[np.int64], generator: np.random.Generator) -> int:
    """Position of a sector's leader: node k with probability ``p_km / p_m``."""
    return int(generator.choice(len(num_examples), p=num_examples / num_examples.sum()))
