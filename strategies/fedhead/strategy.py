"""FedHEAD: sectors with a leader each, which distils its members' ensemble."""

from collections.abc import Iterable, Mapping, Sequence
from logging import INFO, WARNING
from statistics import median
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from flwr_distill.base.text import listed
from flwr_distill.links.records import LinkMode
from flwr_distill.links.routes import Links
from flwr_distill.protocol.arrays import Arrays, as_arrays, as_record, model_arrays, sent_arrays
from flwr_distill.protocol.meeting import one_line
from flwr_distill.protocol.messages import (
    ARRAYS,
    CONFIG,
    DELIVERY,
    LINK_ERROR,
    NUM_EXAMPLES,
    PARCEL,
    REJECTED,
    ROUTE,
    SERVER_ROUND,
    TRAIN_LOSS,
)
from flwr_distill.protocol.outliers import update_norm
from flwr_distill.protocol.replies import number, set_aside, usable
from flwr_distill.strategies.common.answered import Answered
from flwr_distill.strategies.common.averages import weighted_mean
from flwr_distill.strategies.common.configured import Configured
from flwr_distill.strategies.common.directory import Directory
from flwr_distill.strategies.common.leaders import successor
from flwr_distill.strategies.common.robust import trimmed_mean
from flwr_distill.strategies.common.state import check_tag, tag
from flwr_distill.strategies.common.topology import Cluster, Topology
from flwr_distill.strategies.fedhead.membership import Membership
from flwr_distill.strategies.fedhead.method import (
    AGGREGATE_SECTOR,
    DISTILL_SECTOR,
    GLOBAL_MODEL,
    HAND_IN,
    HAND_OUT,
    LEADS,
    LEAST_GAIN,
    LONGEST,
    RULE,
    SECTOR_MODEL,
    TRAIN_SECTOR,
    UPDATE_NORM,
    FedHEADSettings,
)
from flwr_distill.strategies.fedhead.screening import (
    Norms,
    agreeing,
    far_longer,
    longest,
    points_away,
)
from flwr_distill.task.errors import SettingsError

Weighted = tuple[float, Arrays]
"""A sector's samples and model."""

ALIKE = 3.0
"""Times as far from the median as the witnesses that an honest leader may be, where members send
each of them another model."""
ROUNDING = 1e-3
"""Share of the update by which sums in another order may differ."""
HEADER = 1024
"""Bytes that an array's name, type and shape may take in a parcel."""
FEWEST_WITNESSES = 2
MOST_WITNESSES = 4
"""Members that average again what a suspected leader did; each gets the whole sector's models."""


class FedHEAD(Configured, Answered, FedAvg):
    """Federated learning in sectors, with ensemble distillation on a leader in each.

    Each round draws a leader in each sector. (1) All nodes train and send their models to their
    leader, (2) which averages them, ``w_m = sum_k (p_km / p_m) w_km``; (3) the server averages the
    sectors, ``z = sum_m p_m w_m``; (4) each leader distils its members' ensemble, on its own data,
    into a student that starts at z; (5) the server averages the students, ``w = sum_m p_m z_m``.
    Over direct links the server exchanges models with leaders only: they hand w to their members.

    If a leader fails in step 4, its sector keeps w_m for the round. If it fails earlier, the member
    with most samples takes over, the others send it their trained models again, and w_m misses the
    failed leader's model. If nobody can take over, the sector sits out the round. A leader that
    cannot hand out w is replaced at once. A failed leader does not lead in the next round.

    Unlike in the paper, a leader that holds few of its sector's classes does not distil
    (``least_classes``): on its data alone the student would forget the others. Nor does one whose
    samples the ensemble hardly predicts better than z (``least_gain``).

    No leader is believed. p_km is what node k said when it was met, as far as it counts beside
    others' claims (`Directory.samples`); with a rule other than the mean, nodes lead as often
    whatever they claim.
    Members tell the norm of their update, and w_m is refused if it is longer than all of them, z_m
    if its norm is absurd beside them and those of earlier rounds. Who sent it leads no more. With
    the rule ``agreement``, norms far above those of most nodes are left out, and leaders are told
    how long an update may be.

    Parameters
    ----------
    links : str (default: "auto")
        How members and leaders send to each other: ``relay`` (through the server, sealed),
        ``direct`` or ``auto`` (direct where that works).
    phase_timeout : float (default: 600.0)
        Seconds to wait for replies in each phase.
    seed : int (default: 0)
        Seed of the sectors and of the leaders.
    directory : Directory, optional (default: None)
        Descriptions of known nodes; None starts an empty one.
    norm_threshold : float (default: 5.0)
        Score above which a norm is absurd; see `protocol.outliers.absurdly_large`.
    fraction_evaluate : float (default: 0.0)
        Share of all nodes that evaluate the global model each round.
    **kwargs
        Settings (`strategies.fedhead.method.FedHEADSettings`), and what Flower's FedAvg takes. Its
        sampling of training nodes is not used: all train.

    Notes
    -----
    Without a fixed leader, node k leads with probability ``p_km / p_m``, or with a rule other than
    the mean all do alike; fixed leaders are those of the paper's table 7.

    Letters and steps are the FedHEAD paper's. It leaves open what the ensemble averages; here it is
    probabilities by default, and students minimise ``KL(teacher || student)``.
    """

    settings: FedHEADSettings = FedHEADSettings()
    run_arguments: ClassVar[tuple[str, ...]] = (
        *("links", "phase_timeout", "seed", "directory", "norm_threshold"),
    )

    def __init__(
        self,
        *,
        links: LinkMode = "auto",
        phase_timeout: float = 600.0,
        seed: int = 0,
        directory: Directory | None = None,
        norm_threshold: float = 5.0,
        fraction_evaluate: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(fraction_evaluate=fraction_evaluate, **kwargs)
        self.links = links
        self.phase_timeout = phase_timeout
        self.seed = seed
        self.topology: Topology | None = None
        """Leaders and members of the round."""
        self._membership = Membership(
            self.settings.sectors,
            self.settings.fixed_leader,
            seed,
            directory or Directory(),
            evenly=self.settings.rule != "mean",
        )
        self._first = True
        self._norms = Norms(norm_threshold)
        self._num_examples: dict[int, int]
        self._grid: Grid
        self._routes: dict[int, ConfigRecord]
        self._rejected: dict[int, dict[int, str]]
        """Why each leader of the round rejected models, by node."""
        self._global: Arrays = {}

    def summary(self) -> None:
        """Log summary configuration of the strategy."""
        log(INFO, "\t├──> %s settings:", type(self).__name__)
        settings, audited = self.settings, ", audited" if self.settings.audit else ""
        log(INFO, "\t│\t├── Sectors: %d, where nodes do not declare theirs", settings.sectors)
        log(INFO, "\t│\t├── Leaders: %s", "largest" if settings.fixed_leader else "drawn")
        log(INFO, "\t│\t├── Rule: %s%s", settings.rule, audited)
        log(INFO, "\t│\t└── Distillation: %s", settings.ensemble_distillation)
        super().summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the leaders, have them hand out the model, and have all nodes train (step 1)."""
        self._grid, self._global = grid, as_arrays(arrays)
        membership, self._first = self._membership, server_round == 1
        nodes = membership.meet(grid, self.min_available_nodes, self.phase_timeout)
        links = membership.links(self.links)
        barred, membership.failed = membership.failed, set()
        self._num_examples = membership.num_examples(nodes)
        if self.links == "direct":
            barred |= membership.without_address(nodes)
        clusters = membership.draw_clusters(nodes, server_round, barred)
        downloads = self._hand_out(clusters, links, arrays)
        if membership.failed:  # other sectors draw the same leader again
            barred |= membership.failed
            clusters = membership.draw_clusters(nodes, server_round, barred)
        log(INFO, "%s: leaders of the round: %s", type(self).__name__, [c.head for c in clusters])
        self.topology = Topology(clusters, groups=())
        self._routes = {}
        messages = []
        for cluster in clusters:
            ends = [(member, cluster.head) for member in cluster.members]
            routes = self._possible_routes(links, ends, SECTOR_MODEL)
            self._routes |= {member: route for (member, _), route in routes.items()}
            for node in (cluster.head, *cluster.members):
                leads = node == cluster.head
                if not leads and node not in self._routes:
                    continue
                settings = ConfigRecord({**config, SERVER_ROUND: server_round, LEADS: leads})
                content = RecordDict({CONFIG: settings})
                content.update(downloads.get(node, {ARRAYS: arrays}))
                if not leads:
                    content[ROUTE] = self._routes[node]
                messages.append(Message(content, node, TRAIN_SECTOR))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average sectors, distil in each, and average again (steps 2 to 5)."""
        replies = usable(replies)
        num_examples, metrics = self._trained(replies)
        able = [reply for reply in replies if reply.metadata.src_node_id in num_examples]
        sectors = self._aggregate_sectors(server_round, num_examples, self._deliveries(able))
        if not sectors:
            log(WARNING, "Round %d: no sector has a model, the global one stays", server_round)
            return None, None
        mean = weighted_mean(sectors.values())
        distilled = self._distil_sectors(server_round, sectors, mean)
        combined = self.combine(
            server_round,
            [(weight, distilled.get(lead, arrays)) for lead, (weight, arrays) in sectors.items()],
        )
        return as_record(combined), metrics

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, besides the global model."""
        return {**tag(self), **self._membership.state_dict(), **self._norms.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; see `CheckedFedAvg`."""
        check_tag(state, self)
        self._membership.load_state_dict(state)
        self._norms.load_state_dict(state)

    def combine(self, server_round: int, sectors: list[Weighted]) -> Arrays:
        """Step 5: ``w = sum_m p_m z_m``."""
        return weighted_mean(sectors)

    def _hand_out(
        self, clusters: tuple[Cluster, ...], links: Links, arrays: ArrayRecord
    ) -> dict[int, dict[str, ConfigRecord]]:
        """Step 5 of the previous round, over direct links: leaders hand w to their members.

        Returns
        -------
        dict[int, dict[str, ConfigRecord]]
            For nodes that need no w from the server, the records that replace it in their train
            message: a member's delivery from its leader, none for a leader.
        """
        routes: dict[int, dict[int, ConfigRecord]] = {}
        messages = []
        for cluster in clusters:
            ends = [(cluster.head, member) for member in cluster.members]
            possible = self._possible_routes(links, ends, GLOBAL_MODEL)
            routes[cluster.head] = {
                member: ConfigRecord({**route, "link": "direct"})
                for (_, member), route in possible.items()
                if _is_direct(route)
            }
            if routes[cluster.head]:
                by_rank = {
                    f"{ROUTE}.{cluster.members.index(member)}": route
                    for member, route in routes[cluster.head].items()
                }
                content = RecordDict({ARRAYS: arrays, **by_rank})
                messages.append(Message(content, cluster.head, HAND_OUT))
        replies = self._ask(messages)
        downloads: dict[int, dict[str, ConfigRecord]] = {}
        for cluster in clusters:
            if (reply := replies.get(cluster.head)) is None:
                continue
            downloads[cluster.head] = {}
            for rank, member in enumerate(cluster.members):
                parcel = reply.content.config_records.get(f"{PARCEL}.{rank}")
                if parcel is None or member not in routes[cluster.head]:
                    continue
                try:
                    delivery = links.forward(routes[cluster.head][member], parcel)
                except ValueError as error:
                    log(WARNING, "Node %d handed out a bad parcel: %s", cluster.head, error)
                    continue
                downloads[member] = {DELIVERY: delivery}
        return downloads

    def _possible_routes(
        self, links: Links, ends: Iterable[tuple[int, int]], purpose: str
    ) -> dict[tuple[int, int], ConfigRecord]:
        """Routes by (sender, receiver), without impossible ones, which are logged.

        Raises
        ------
        SettingsError
            If one is impossible in the first round, when the user can still change the setting.
        """
        routes = {}
        largest = sum(array.nbytes + HEADER for array in self._global.values())
        for sender, receiver in ends:
            try:
                routes[sender, receiver] = links.route(sender, receiver, purpose, largest)
            except SettingsError as error:
                if self._first:
                    raise
                log(WARNING, "Node %d cannot send to node %d: %s", sender, receiver, error)
        return routes

    def _trained(self, replies: list[Message]) -> tuple[dict[int, int], MetricRecord]:
        """Samples of each node that trained, and the mean loss; notes the norms of updates."""
        losses: dict[int, float] = {}
        norms: dict[int, float] = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            try:
                losses[node], norms[node] = number(reply, TRAIN_LOSS), number(reply, UPDATE_NORM)
            except ValueError as error:
                set_aside(self._grid, node, TRAIN_SECTOR, one_line(error))
        for node, reason in self._norms.begin_round(norms).items():
            set_aside(self._grid, node, TRAIN_SECTOR, reason)
        if self.settings.rule == "agreement":
            long = far_longer(self._norms.told, self._num_examples)
            for node in long:
                set_aside(self._grid, node, TRAIN_SECTOR, "its norm is far above most nodes'")
            self._norms.leave_out(long)
        num_examples = {node: self._num_examples[node] for node in self._norms.told}
        loss = sum(count * losses[node] for node, count in num_examples.items())
        return num_examples, MetricRecord({TRAIN_LOSS: loss / max(sum(num_examples.values()), 1)})

    def _deliveries(self, replies: Iterable[Message]) -> dict[int, ConfigRecord]:
        """Members' models, as deliveries for their leaders."""
        links = self._membership.links(self.links)
        deliveries: dict[int, ConfigRecord] = {}
        for reply in replies:
            if (node := reply.metadata.src_node_id) not in self._routes:
                continue
            if (parcel := reply.content.config_records.get(PARCEL)) is None:
                report = reply.content.config_records.get(CONFIG, ConfigRecord())
                reason = one_line(report.get(LINK_ERROR))
                log(WARNING, "Node %d sent its leader nothing: %s", node, reason)
                continue
            try:
                deliveries[node] = links.forward(self._routes[node], parcel)
            except ValueError as error:
                set_aside(self._grid, node, reply.metadata.message_type, one_line(error))
        return deliveries

    def _aggregate_sectors(
        self,
        server_round: int,
        num_examples: Mapping[int, int],
        deliveries: Mapping[int, ConfigRecord],
    ) -> dict[int, Weighted]:
        """Step 2. Samples and w_m of each sector, by leader; failed leaders are replaced."""
        clusters = list(self.topology.clusters) if self.topology else []
        self._rejected = {}
        means: dict[int, Weighted] = {}
        waiting = list(range(len(clusters)))
        while waiting:
            led = [clusters[i] for i in waiting if clusters[i].head in num_examples]
            means |= self._average(server_round, led, num_examples, deliveries)
            leaderless = [i for i in waiting if clusters[i].head not in means]
            waiting = []
            for i in leaderless:
                self._membership.fail(clusters[i].head)
                if (cluster := self._with_new_leader(clusters[i], num_examples)) is not None:
                    clusters[i] = cluster
                    waiting.append(i)
            deliveries = self._collect_again([clusters[i] for i in waiting], num_examples)
        if self.settings.audit and means:
            for i in self._suspected(clusters, means):
                clusters[i] = self._audited(server_round, clusters[i], means, num_examples)
        self.topology = Topology(tuple(clusters), groups=())
        sectors = {c.head: means[c.head] for c in clusters if c.head in means}
        for leader in sectors:
            for node, reason in self._rejected[leader].items():
                reason = f"leader {leader} rejects it: {reason}"
                set_aside(self._grid, node, TRAIN_SECTOR, one_line(reason))
        return sectors

    def _average(
        self,
        server_round: int,
        clusters: list[Cluster],
        num_examples: Mapping[int, int],
        deliveries: Mapping[int, ConfigRecord],
    ) -> dict[int, Weighted]:
        """Have leaders average their sectors' models."""
        messages = []
        for cluster in clusters:
            ranked = {rank: n for rank, n in enumerate(cluster.members, 1) if n in deliveries}
            counts = {f"{NUM_EXAMPLES}.{rank}": num_examples[n] for rank, n in ranked.items()}
            counts[f"{NUM_EXAMPLES}.0"] = num_examples[cluster.head]
            norms = {f"{UPDATE_NORM}.{rank}": self._norms.told[n] for rank, n in ranked.items()}
            config = ConfigRecord(
                {**counts, **norms, SERVER_ROUND: server_round, RULE: self.settings.rule}
            )
            if self.settings.rule == "agreement":
                config[LONGEST] = longest(self._norms.told, num_examples)
            content = RecordDict({CONFIG: config})
            content.update({f"{DELIVERY}.{rank}": deliveries[n] for rank, n in ranked.items()})
            messages.append(Message(content, cluster.head, AGGREGATE_SECTOR))
        means: dict[int, Weighted] = {}
        replies = self._ask(messages)
        for cluster in clusters:
            if (reply := replies.get(cluster.head)) is None:
                continue
            averaged = {n for n in cluster.members if n in deliveries} | {cluster.head}
            self._rejected[cluster.head] = _rejected(cluster, reply)
            averaged -= self._rejected[cluster.head].keys()
            try:
                mean = self._model_of(reply)
                self._norms.check_mean(mean, self._global, averaged)
            except ValueError as error:
                set_aside(self._grid, cluster.head, AGGREGATE_SECTOR, one_line(error))
                self._membership.distrust(cluster.head)
                continue
            means[cluster.head] = (sum(num_examples[node] for node in averaged), mean)
        return means

    def _suspected(self, clusters: Sequence[Cluster], means: Mapping[int, Weighted]) -> list[int]:
        """Places of clusters whose mean points away from the others', or has none beside it."""
        led = [i for i, cluster in enumerate(clusters) if cluster.head in means]
        weights = [means[clusters[i].head][0] for i in led]
        arrays = [means[clusters[i].head][1] for i in led]
        away = points_away(weights, arrays, self._global)
        return [i for i, is_away in zip(led, away, strict=True) if is_away or len(led) == 1]

    def _audited(
        self,
        server_round: int,
        cluster: Cluster,
        means: dict[int, Weighted],
        num_examples: Mapping[int, int],
    ) -> Cluster:
        """Have up to four members average their sector as well; the median of all counts.

        With the leader, that is an honest majority of five nodes of which two are hostile.

        Returns
        -------
        Cluster
            The cluster, led by a witness if the leader's mean is not like the witnesses'.
        """
        able = [node for node in cluster.members if self._is_able(node, num_examples)]
        if len(able) < FEWEST_WITNESSES:
            return cluster
        draws = np.random.default_rng([self.seed, server_round, FEWEST_WITNESSES])
        again = {}
        for place in draws.permutation(len(able))[:MOST_WITNESSES]:
            others = (n for n in (cluster.head, *cluster.members) if n != able[place])
            again[able[place]] = Cluster(able[place], tuple(others))
        found: dict[int, Weighted] = {}
        for each in again.values():
            deliveries = self._collect_again([each], num_examples)
            found |= self._average(server_round, [each], num_examples, deliveries)
        if len(found) < FEWEST_WITNESSES:
            return cluster
        weight, mean = means[cluster.head]
        middle = trimmed_mean([mean, *(arrays for _, arrays in found.values())])
        distances = {node: update_norm(arrays, middle) for node, (_, arrays) in found.items()}
        near = max(ALIKE * median(distances.values()), ROUNDING * update_norm(middle, self._global))
        if update_norm(mean, middle) <= near:
            means[cluster.head] = (weight, middle)
            return cluster
        reason = f"its mean is not that of nodes {', '.join(map(str, found))}"
        set_aside(self._grid, cluster.head, AGGREGATE_SECTOR, reason)
        self._membership.distrust(cluster.head)
        del means[cluster.head]
        nearest = min(distances, key=distances.__getitem__)
        means[nearest] = (found[nearest][0], middle)
        return again[nearest]

    def _with_new_leader(self, cluster: Cluster, num_examples: Mapping[int, int]) -> Cluster | None:
        """The cluster led by its member with most samples; None if no member is able to."""
        able = [node for node in cluster.members if self._is_able(node, num_examples)]
        leading = self._membership.leading(num_examples)
        head = successor(cluster.head, able, lambda nodes: max(nodes, key=leading.__getitem__))
        if head is None:
            return None
        nodes = (cluster.head, *cluster.members)
        return Cluster(head, tuple(node for node in nodes if node != head))

    def _collect_again(
        self, clusters: list[Cluster], num_examples: Mapping[int, int]
    ) -> dict[int, ConfigRecord]:
        """Have members send their models to other leaders of their sectors."""
        links = self._membership.links(self.links)
        messages = []
        for cluster in clusters:
            able = [node for node in cluster.members if self._is_able(node, num_examples)]
            ends = [(node, cluster.head) for node in able]
            for (node, _), route in self._possible_routes(links, ends, SECTOR_MODEL).items():
                self._routes[node] = route
                messages.append(Message(RecordDict({ROUTE: route}), node, HAND_IN))
        return self._deliveries(self._ask(messages).values())

    def _is_able(self, node: int, num_examples: Mapping[int, int]) -> bool:
        return node in num_examples and not self._membership.has_failed(node)

    def _distil_sectors(
        self, server_round: int, sectors: Mapping[int, Weighted], mean: Arrays
    ) -> dict[int, Arrays]:
        """Step 4. z_m of each sector whose leader succeeded."""
        request = self.settings.ensemble_distillation.model_dump(by_alias=True)
        content = RecordDict(
            {
                ARRAYS: as_record(mean),
                CONFIG: ConfigRecord(
                    {**request, SERVER_ROUND: server_round, LEAST_GAIN: self.settings.least_gain}
                ),
            }
        )
        clusters = self.topology.clusters if self.topology else ()
        narrow = self._membership.narrow_leaders(clusters, self.settings.least_classes)
        if narrow:
            text = "%s: sectors of nodes %s keep their plain averages: these hold few classes"
            log(INFO, text, type(self).__name__, listed([str(node) for node in narrow]))
        able = [leader for leader in sectors if leader not in narrow]
        replies = self._ask([Message(content, leader, DISTILL_SECTOR) for leader in able])
        distilled = {}
        for leader in able:
            if leader in replies and ARRAYS not in replies[leader].content:
                why = "its ensemble is no better"
                log(INFO, "Sector of node %d keeps its plain average: %s", leader, why)
                continue
            try:
                student = self._model_of(replies[leader])
            except (KeyError, ValueError) as error:
                log(WARNING, "Sector of node %d keeps its plain average: %s", leader, error)
                self._membership.fail(leader)
                continue
            try:
                self._norms.check_student(leader, student, mean)
            except ValueError as error:
                set_aside(self._grid, leader, DISTILL_SECTOR, one_line(error))
                self._membership.distrust(leader)
                continue
            distilled[leader] = student
        if self.settings.rule == "mean":
            return distilled
        weights = {leader: weight for leader, (weight, _) in sectors.items()}
        agreed = agreeing(distilled, weights, mean)
        if distilled and not agreed:
            log(WARNING, "Students point away from each other: sectors keep their plain averages")
        for leader in [leader for leader in distilled if agreed and leader not in agreed]:
            set_aside(self._grid, leader, DISTILL_SECTOR, "its student points away from the others")
        return agreed

    def _ask(self, messages: list[Message]) -> dict[int, Message]:
        """Replies by node, in the order of ``messages``; nodes without one count as failed."""
        replies = usable(self._grid.send_and_receive(messages, timeout=self.phase_timeout))
        by_node = {reply.metadata.src_node_id: reply for reply in replies}
        nodes = [message.metadata.dst_node_id for message in messages]
        self._membership.fail(*(node for node in nodes if node not in by_node))
        return {node: by_node[node] for node in nodes if node in by_node}

    def _model_of(self, reply: Message) -> Arrays:
        return model_arrays(sent_arrays(reply), self._global)


def _is_direct(route: ConfigRecord) -> bool:
    return bool(route["address"]) and route["link"] != "relay"


def _rejected(cluster: Cluster, reply: Message) -> dict[int, str]:
    """Nodes whose models a leader rejected, and why."""
    reasons = reply.content.config_records.get(CONFIG, ConfigRecord())
    ranked = enumerate((cluster.head, *cluster.members))
    return {n: str(reasons[key]) for rank, n in ranked if (key := f"{REJECTED}.{rank}") in reasons}
