"""Means of sectors by their leaders (FedHEAD, step 2), of whom some are replaced or audited."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict

from flwr_distill.protocol.arrays import Arrays
from flwr_distill.protocol.meeting import one_line
from flwr_distill.protocol.messages import (
    CONFIG,
    DELIVERY,
    NUM_EXAMPLES,
    REJECTED,
    SERVER_ROUND,
    ranked,
)
from flwr_distill.protocol.outliers import update_norm
from flwr_distill.protocol.replies import set_aside
from flwr_distill.strategies.common.robust import trimmed_mean
from flwr_distill.strategies.common.topology import Cluster, successor
from flwr_distill.strategies.fedhead.exchange import Exchange
from flwr_distill.strategies.fedhead.method import (
    AGGREGATE_SECTOR,
    LONGEST,
    RULE,
    TRAIN_SECTOR,
    UPDATE_NORM,
    FedHEADSettings,
)
from flwr_distill.strategies.fedhead.screening import Norms, longest, points_away

Weighted = tuple[float, Arrays]
"""A sector's samples and model."""

ALIKE = 3.0
"""Times as far from the median as the witnesses that an honest leader may be, where members send
each of them another model."""
ROUNDING = 1e-3
"""Share of the update by which sums in another order may differ."""
MIN_WITNESSES = 2
MAX_WITNESSES = 4
"""Members that average again what a suspected leader did; each gets the whole sector's models."""


@dataclass
class SectorMeans:
    """Leaders' means in one round.

    Parameters
    ----------
    num_examples : Mapping[int, int]
        Samples of each node that trained.
    """

    exchange: Exchange
    norms: Norms
    settings: FedHEADSettings
    seed: int
    server_round: int
    num_examples: Mapping[int, int]
    _rejected: dict[int, dict[int, str]] = field(default_factory=dict)
    """Why each leader rejected models, by node."""

    def of(
        self, clusters: list[Cluster], deliveries: Mapping[int, ConfigRecord]
    ) -> tuple[list[Cluster], dict[int, Weighted]]:
        """The clusters with their new leaders; and samples and w_m of each sector, by leader."""
        clusters = list(clusters)
        means: dict[int, Weighted] = {}
        waiting = list(range(len(clusters)))
        while waiting:
            led = [clusters[i] for i in waiting if clusters[i].head in self.num_examples]
            means |= self._average(led, deliveries)
            leaderless = [i for i in waiting if clusters[i].head not in means]
            waiting = []
            for i in leaderless:
                self.exchange.membership.fail(clusters[i].head)
                if (cluster := self._with_new_leader(clusters[i])) is not None:
                    clusters[i] = cluster
                    waiting.append(i)
            deliveries = self._collect_again([clusters[i] for i in waiting])
        if self.settings.audit and means:
            for i in self._suspected(clusters, means):
                clusters[i] = self._audited(clusters[i], means)
        sectors = {c.head: means[c.head] for c in clusters if c.head in means}
        for leader in sectors:
            for node, reason in self._rejected[leader].items():
                reason = f"leader {leader} rejects it: {reason}"
                self._set_aside(node, TRAIN_SECTOR, reason)
        return clusters, sectors

    def _average(
        self, clusters: list[Cluster], deliveries: Mapping[int, ConfigRecord]
    ) -> dict[int, Weighted]:
        """Have leaders average their sectors' models."""
        asked, messages = {}, []
        for cluster in clusters:
            members = {rank: n for rank, n in enumerate(cluster.members, 1) if n in deliveries}
            asked[cluster.head] = nodes = {0: cluster.head, **members}
            norms = self.norms.of_round
            config = ConfigRecord(
                {
                    **{f"{NUM_EXAMPLES}.{r}": self.num_examples[n] for r, n in nodes.items()},
                    **{f"{UPDATE_NORM}.{r}": norms[n] for r, n in members.items()},
                    SERVER_ROUND: self.server_round,
                    RULE: self.settings.rule,
                }
            )
            if self.settings.rule == "agreement":
                config[LONGEST] = longest(norms, self.num_examples)
            parcels = {f"{DELIVERY}.{rank}": deliveries[n] for rank, n in members.items()}
            content = RecordDict({CONFIG: config, **parcels})
            messages.append(Message(content, cluster.head, AGGREGATE_SECTOR))
        means: dict[int, Weighted] = {}
        for leader, reply in self.exchange.ask(messages).items():
            nodes = asked[leader]
            reasons = ranked(reply.content.config_records.get(CONFIG, ConfigRecord()), REJECTED)
            rejected = {nodes[rank]: str(why) for rank, why in reasons.items() if rank in nodes}
            self._rejected[leader] = rejected
            averaged = {*nodes.values()} - rejected.keys()
            try:
                mean = self.exchange.model_of(reply)
                start, rounding = self.exchange.start_on_nodes, self.exchange.rounding
                self.norms.check_mean(mean, start, averaged, rounding)
            except ValueError as error:
                self._distrust(leader, one_line(error))
                continue
            means[leader] = (sum(self.num_examples[node] for node in averaged), mean)
        return means

    def _suspected(self, clusters: Sequence[Cluster], means: Mapping[int, Weighted]) -> list[int]:
        """Places of clusters whose mean points away from the others', or has none beside it."""
        led = [i for i, cluster in enumerate(clusters) if cluster.head in means]
        weights = [means[clusters[i].head][0] for i in led]
        arrays = [means[clusters[i].head][1] for i in led]
        away = points_away(weights, arrays, self.exchange.start)
        return [i for i, is_away in zip(led, away, strict=True) if is_away or len(led) == 1]

    def _audited(self, cluster: Cluster, means: dict[int, Weighted]) -> Cluster:
        """Have up to four members average their sector as well; the median of all counts.

        With the leader, that is an honest majority of five nodes of which two are hostile. Returns
        the cluster, led by a witness if the leader's mean is not like the witnesses'.
        """
        able = self._able(cluster.members)
        if len(able) < MIN_WITNESSES:
            return cluster
        draws = np.random.default_rng([self.seed, self.server_round, MIN_WITNESSES])
        again = {}
        for place in draws.permutation(len(able))[:MAX_WITNESSES]:
            others = (n for n in (cluster.head, *cluster.members) if n != able[place])
            again[able[place]] = Cluster(able[place], tuple(others))
        witnessed: dict[int, Weighted] = {}
        for each in again.values():
            witnessed |= self._average([each], self._collect_again([each]))
        if len(witnessed) < MIN_WITNESSES:
            return cluster
        weight, mean = means[cluster.head]
        middle = trimmed_mean([mean, *(arrays for _, arrays in witnessed.values())])
        distances = {n: update_norm(arrays, middle) for n, (_, arrays) in witnessed.items()}
        moved = update_norm(middle, self.exchange.start)
        if update_norm(mean, middle) <= max(ALIKE * median(distances.values()), ROUNDING * moved):
            means[cluster.head] = (weight, middle)
            return cluster
        self._distrust(
            cluster.head, f"its mean is not that of nodes {', '.join(map(str, witnessed))}"
        )
        del means[cluster.head]
        nearest = min(distances, key=distances.__getitem__)
        means[nearest] = (witnessed[nearest][0], middle)
        return again[nearest]

    def _with_new_leader(self, cluster: Cluster) -> Cluster | None:
        """The cluster led by its member with most samples; None if no member is able to."""
        leading = self.exchange.membership.leading(self.num_examples)
        able = self._able(cluster.members)
        head = successor(cluster.head, able, lambda nodes: max(nodes, key=leading.__getitem__))
        if head is None:
            return None
        nodes = (cluster.head, *cluster.members)
        return Cluster(head, tuple(node for node in nodes if node != head))

    def _collect_again(self, clusters: Sequence[Cluster]) -> dict[int, ConfigRecord]:
        members = {cluster.head: self._able(cluster.members) for cluster in clusters}
        return self.exchange.collect_again(members)

    def _able(self, members: Sequence[int]) -> list[int]:
        has_failed = self.exchange.membership.has_failed
        return [node for node in members if node in self.num_examples and not has_failed(node)]

    def _distrust(self, leader: int, reason: str) -> None:
        self._set_aside(leader, AGGREGATE_SECTOR, reason)
        self.exchange.membership.distrust(leader)

    def _set_aside(self, node: int, phase: str, reason: str) -> None:
        set_aside(self.exchange.grid, node, phase, one_line(reason))
