"""The nodes of FedHEAD's sectors: who is there, where each belongs, and who leads."""

from collections.abc import Collection, Mapping
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy.strategy_utils import sample_nodes

from strategies.links import Links
from strategies.replies import number, usable
from strategies.sectors import assign_sectors, draw_leader
from strategies.topology import Cluster
from task.links import Introduction, LinkMode
from task.messages import DESCRIBE, INTRODUCTION, METRICS, NUM_EXAMPLES, PARTITION_ID, SECTOR


class Membership:
    """Nodes in sectors, as they come and go.

    A node is known again by its partition, else by its id: its identity.

    Parameters
    ----------
    num_sectors : int
        M, where nodes do not declare their sector.
    fixed_leader : bool
        Whether the node with most data leads, or node k with probability ``p_km / p_m``.
    seed : int
        Seed of the sectors and of the leaders.

    Attributes
    ----------
    failed : set[int]
        Identities of those that failed as leaders, this round or at the end of it the last.
    """

    def __init__(self, num_sectors: int, fixed_leader: bool, seed: int) -> None:
        self.num_sectors = num_sectors
        self.fixed_leader = fixed_leader
        self.seed = seed
        self.failed: set[int] = set()
        self._introductions: dict[int, Introduction] = {}
        self._num_examples: dict[int, int] = {}
        self._identities: dict[int, int] = {}
        self._sector_of: dict[int, int] = {}
        """By identity."""

    def meet(self, grid: Grid, min_nodes: int, timeout: float) -> list[int]:
        """Ask new nodes who they are, and give each a sector.

        Parameters
        ----------
        grid : Grid
            Any Flower grid.
        min_nodes : int
            Nodes to wait for before sectors are formed.
        timeout : float
            Seconds to wait for replies.

        Returns
        -------
        list[int]
            Ids of the nodes connected that can take part, in the order of their identities.

        Raises
        ------
        RuntimeError
            If there are none.
        """
        wanted = 1 if self._num_examples else min_nodes
        sample_nodes(grid, wanted, wanted)
        nodes = list(grid.get_node_ids())
        new = [Message(RecordDict(), n, DESCRIBE) for n in nodes if n not in self._num_examples]
        declared: dict[int, int | None] = {}
        for reply in usable(grid.send_and_receive(new, timeout=timeout)):
            node = reply.metadata.src_node_id
            told = reply.content.config_records.get(INTRODUCTION, ConfigRecord())
            try:
                introduction = Introduction.checked(told, "introduction")
                count = samples_of(reply)
                metrics = reply.content.metric_records[METRICS]
                identity = int(number(reply, PARTITION_ID)) if PARTITION_ID in metrics else node
                declared[identity] = int(number(reply, SECTOR)) if SECTOR in metrics else None
            except ValueError as error:
                log(WARNING, "Node %d cannot take part: %s", node, error)
                continue
            self._introductions[node], self._num_examples[node] = introduction, count
            self._identities[node] = identity
        self._sector_of = assign_sectors(
            {identity: declared[identity] for identity in sorted(declared)},
            self.num_sectors,
            np.random.default_rng(self.seed),
            self._sector_of,
        )
        able = [node for node in nodes if node in self._num_examples]
        if not able:
            raise RuntimeError(f"none of {len(nodes)} nodes can take part; the log says why")
        return sorted(able, key=lambda node: (self._identities[node], node))

    def links(self, mode: LinkMode) -> Links:
        """Routes between the nodes that were met."""
        return Links(self._introductions, mode)

    def draw_clusters(
        self, nodes: list[int], server_round: int, barred: Collection[int]
    ) -> tuple[Cluster, ...]:
        """A leader in each sector, of no barred identity where there is another node."""
        generator = np.random.default_rng([self.seed, server_round])
        clusters = []
        sector_of = {node: self._sector_of[self._identities[node]] for node in nodes}
        for sector in sorted(set(sector_of.values())):
            inside = [node for node in nodes if sector_of[node] == sector]
            able = [node for node in inside if self._identities[node] not in barred] or inside
            sizes = np.array([self._num_examples[node] for node in able])
            drawn = int(sizes.argmax()) if self.fixed_leader else draw_leader(sizes, generator)
            members = tuple(node for node in inside if node != able[drawn])
            clusters.append(Cluster(head=able[drawn], members=members))
        return tuple(clusters)

    def fail(self, *nodes: int) -> None:
        """Note that nodes failed."""
        self.failed.update(self._identities[node] for node in nodes)

    def has_failed(self, node: int) -> bool:
        """Whether a node failed since `failed` was emptied."""
        return self._identities[node] in self.failed

    def state_dict(self) -> dict[str, Any]:
        """What lasts over rounds and ids."""
        return {"sector-of": dict(self._sector_of), "failed": sorted(self.failed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self._sector_of = dict(state["sector-of"])
        self.failed = set(state["failed"])


def samples_of(reply: Message) -> int:
    """Samples that a node names, at least one.

    Raises
    ------
    ValueError
        If it names none.
    """
    count = int(number(reply, NUM_EXAMPLES))
    if count < 1:
        raise ValueError(f"node {reply.metadata.src_node_id} has {count} samples")
    return count
