"""FedSeq of Chen et al.: the model goes around the ring of each cluster; heads are averaged."""

from logging import INFO
from typing import ClassVar

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common import log

from flwr_distill.base.text import counted
from flwr_distill.protocol.messages import ARRAYS
from flwr_distill.strategies.common.topology import Cluster, Topology
from flwr_distill_baselines.common.passing.messages import Turns
from flwr_distill_baselines.common.passing.strategy import Chain, SequentialStrategy
from flwr_distill_baselines.fedseq.method import PASS_ON, TURNS, FedSeqSettings


class FedSeq(SequentialStrategy):
    """Sequential training around a ring of nodes in each cluster (Chen et al. 2023).

    Nodes form random clusters once. In each round the head of a cluster gets the global model and
    passes it to the next node of its ring. Each node trains it and passes it on, until it is back
    at the head, which trains last and sends it to the server. So J models pass within a cluster of
    J nodes, and two between its head and the server: the traffic of HFLDD's eq. 19. The server
    averages clusters by their samples.

    Where a head is away or was never there, the next node of its ring stands in for it. A new node
    joins the smallest cluster with room, or begins another one.

    Parameters
    ----------
    **kwargs
        Settings (`method.FedSeqSettings`), and arguments of `SequentialStrategy`.

    Notes
    -----
    Source: the abstract of "FedSeq: A Hybrid Federated Learning Framework Based on Sequential
    In-Cluster Training" (IEEE Systems Journal), and HFLDD's eq. 19. That the head trains last is
    our choice.
    """

    settings: FedSeqSettings = FedSeqSettings()
    turns: ClassVar[Turns] = TURNS

    @property
    def topology(self) -> Topology | None:
        """The clusters with their heads; None before they are formed."""
        clusters = tuple(Cluster(head, tuple(others)) for head, *others in self.groups)
        return Topology(clusters, ()) if clusters else None

    def form(self, server_round: int) -> None:
        """Deal the first nodes out over random clusters, or have new ones join."""
        placed = {node for group in self.groups for node in group}
        new = [node for node in self.grid.get_node_ids() if node not in placed]
        size = self.settings.cluster_size
        if not self.groups and new:
            draws = np.random.default_rng(self.seed)
            shuffled = [new[i] for i in draws.permutation(len(new))]
            number = -(-len(new) // size)
            self.groups = [shuffled[first::number] for first in range(number)]
            log(INFO, "FedSeq: %s formed", counted(number, "cluster"))
            return
        for node in new:
            smallest = min(self.groups, key=len, default=[])
            if self.groups and len(smallest) < size:
                smallest.append(node)
            else:
                self.groups.append([node])

    def order(self, group: list[int], draws: np.random.Generator) -> list[int]:
        """The ring from the node after the head on; the head, the first that is there, is last."""
        head, *others = group
        return [*others, head]

    def send_off(self) -> None:
        """Have heads pass the global model on; where one fails, the server sends it instead."""
        waiting: dict[int, Chain] = {}
        routes: dict[int, ConfigRecord] = {}
        for chain in self._chains:
            first, head = chain.nodes[0], chain.nodes[-1]
            if first != head and (route := self._route(head, first)) is not None:
                waiting[head], routes[head] = chain, route
        messages = [
            Message(
                RecordDict({ARRAYS: self._arrays, **self._with_coding(routes[head])}), head, PASS_ON
            )
            for head in waiting
        ]
        for head, reply in self._ask(messages).items():
            waiting[head].delivery = self._delivery(reply, routes[head])
