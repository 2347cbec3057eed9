"""Who trains a round of HFLDD, with the others' virtual data that it needs."""

from collections.abc import Sequence
from dataclasses import dataclass
from logging import WARNING

from flwr.app import ArrayRecord
from flwr.common import log
from flwr.serverapp import Grid

from flwr_distill.base.text import counted
from flwr_distill.protocol.replies import NothingUsableError
from flwr_distill.strategies.common.directory import Directory
from flwr_distill.strategies.hfldd.clusters import Clusters
from flwr_distill.strategies.hfldd.exchange import Exchange


def virtual_share(server_round: int, num_rounds: int) -> float:
    """Share of the virtual data that count where all nodes train: from 1 to 0 at half the rounds.

    They help a model that knows little. Later the mean of models trained on real data alone is
    better, as in FedAvg.
    """
    return max(0.0, 1 - 2 * (server_round - 1) / num_rounds) if num_rounds else 1.0


@dataclass
class Heads:
    """Chooses heads, and completes their virtual data.

    Both ways raise NothingUsableError where clusters were just formed and virtual data reached
    nobody.
    """

    clusters: Clusters
    directory: Directory
    exchange: Exchange

    def one_a_cluster(
        self, server_round: int, arrays: ArrayRecord, grid: Grid, *, rotate: bool, forming: bool
    ) -> list[int]:
        """The head of each cluster that has connected nodes; another one each round to `rotate`."""
        if not forming:
            connected = set(grid.get_node_ids())
            if rotate:
                samples = self.directory.samples(connected)
                self.clusters.rotate_heads(server_round, connected, samples)
            self.clusters.replace_heads(server_round, connected)
        self.exchange.complete(server_round, arrays, grid, forming=forming)
        if forming:
            self._check()
        connected = set(grid.get_node_ids())
        heads = [cluster.head for cluster in self.clusters if cluster.head in connected]
        if len(heads) < len(self.clusters):
            away = len(self.clusters) - len(heads)
            log(WARNING, "HFLDD: nobody of %s is connected", counted(away, "cluster"))
        self.clusters.failed = set(heads)
        return heads

    def each_of(
        self,
        nodes: Sequence[int],
        server_round: int,
        arrays: ArrayRecord,
        grid: Grid,
        *,
        complete: bool,
        forming: bool,
    ) -> list[int]:
        """Those of the nodes that are in a cluster and connected.

        One after the other is its cluster's head to `complete` its virtual data; clusters do so
        side by side.
        """
        nodes = [node for node in self.clusters.nodes if node in nodes]
        if complete:
            for _ in self.clusters.turns(nodes):
                self.exchange.complete(server_round, arrays, grid, forming=forming)
            if forming:
                self._check()
        connected = set(grid.get_node_ids())
        return [node for node in nodes if node in connected]

    def _check(self) -> None:
        members = len(self.clusters.nodes) - len(self.clusters)
        if members and not any(any(cluster.held.values()) for cluster in self.clusters):
            sent = counted(members, "member")
            raise NothingUsableError(f"the heads received no virtual data from their {sent}")
