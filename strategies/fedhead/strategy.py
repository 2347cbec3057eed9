"""FedHEAD: sectors with a leader each, which distils its members' ensemble."""

from collections.abc import Iterable, Mapping
from logging import INFO, WARNING
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from flwr_distill.base.text import listed
from flwr_distill.links.records import LinkMode
from flwr_distill.protocol.arrays import Arrays, as_arrays, as_record
from flwr_distill.protocol.meeting import one_line
from flwr_distill.protocol.messages import (
    ARRAYS,
    CONFIG,
    ROUTE,
    SERVER_ROUND,
    TRAIN_LOSS,
)
from flwr_distill.protocol.parcels import codec_of_changes, codec_of_whole
from flwr_distill.protocol.replies import number, set_aside, usable
from flwr_distill.strategies.common.answered import Answered
from flwr_distill.strategies.common.averages import weighted_mean
from flwr_distill.strategies.common.checked import Configured, check_tag, tag
from flwr_distill.strategies.common.directory import Directory
from flwr_distill.strategies.common.topology import Topology
from flwr_distill.strategies.common.traffic import BITS_PER_FLOAT
from flwr_distill.strategies.fedhead.exchange import Exchange
from flwr_distill.strategies.fedhead.means import SectorMeans, Weighted
from flwr_distill.strategies.fedhead.membership import Membership
from flwr_distill.strategies.fedhead.method import (
    DISTILL_SECTOR,
    LEADS,
    MIN_GAIN,
    TRAIN_SECTOR,
    UPDATE_NORM,
    FedHEADSettings,
)
from flwr_distill.strategies.fedhead.screening import (
    Norms,
    agreeing,
    far_longer,
)


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

    Unlike in the paper, a leader with few of its sector's classes does not distil
    (``least_classes``): on its data alone the student would forget the others. Nor does one whose
    samples the ensemble hardly predicts better than z (``least_gain``).

    Leaders are untrusted. p_km is what node k said when it was met, as far as it counts beside
    others' claims (`Directory.samples`); with a rule other than the mean, nodes lead as often
    whatever they claim. Members report the norm of their update. A w_m that is longer than all of
    them is rejected, and so is a z_m whose norm is absurd beside them and those of earlier rounds.
    Who sent it leads no more. With the rule ``agreement``, norms far above those of most nodes are
    rejected, and leaders learn how long an update may be.

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
    down_codec, up_codec : str (default: "float32")
        The run's codecs, by which leaders hand out the model and members send what they trained.
    fraction_evaluate : float (default: 0.0)
        Share of all nodes that evaluate the global model each round.
    **kwargs
        Settings (`strategies.fedhead.method.FedHEADSettings`), and what Flower's FedAvg takes. Its
        sampling of training nodes is not used: all train.

    Notes
    -----
    Without a fixed leader, node k leads with probability ``p_km / p_m``, or with a rule other than
    the mean all do alike; fixed leaders are those of the paper's table 7.

    Letters and steps are the FedHEAD paper's. The ensemble averages the classifiers' outputs (eq.
    4), which are probabilities by default, and students minimise ``KL(teacher || student)``: the
    paper's cross-entropy less a constant. Early stopping is by a tenth of the leader's samples,
    since the paper does not state its validation set, and keeps the best student unless
    ``restore_best`` is off.
    """

    settings: FedHEADSettings = FedHEADSettings()
    run_arguments: ClassVar[tuple[str, ...]] = (
        "links",
        "phase_timeout",
        "seed",
        "directory",
        "norm_threshold",
        "down_codec",
        "up_codec",
    )

    def __init__(
        self,
        *,
        links: LinkMode = "auto",
        phase_timeout: float = 600.0,
        seed: int = 0,
        directory: Directory | None = None,
        norm_threshold: float = 5.0,
        down_codec: str = "float32",
        up_codec: str = "float32",
        fraction_evaluate: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(fraction_evaluate=fraction_evaluate, **kwargs)
        self.links = links
        self.phase_timeout = phase_timeout
        self.seed = seed
        self.down_codec = down_codec
        self.up_codec = up_codec
        self.topology: Topology | None = None
        """Leaders and members of the round."""
        self._membership = Membership(
            self.settings.sectors,
            self.settings.fixed_leader,
            seed,
            directory or Directory(),
            evenly=self.settings.rule != "mean",
        )
        self._norms = Norms(norm_threshold)
        self._num_examples: dict[int, int]
        self._exchange: Exchange

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
        membership = self._membership
        nodes = membership.meet(grid, self.min_available_nodes, self.phase_timeout)
        exchange = self._exchange = Exchange(
            grid,
            membership,
            membership.links(self.links),
            as_arrays(arrays),
            self.phase_timeout,
            strict=server_round == 1,
            codec_of_changes=codec_of_changes(self.up_codec),
            codec_of_model=codec_of_whole(self.down_codec),
        )
        barred, membership.failed = membership.failed, set()
        self._num_examples = membership.num_examples(nodes)
        if self.links == "direct":
            barred |= membership.without_address(nodes)
        clusters = membership.draw_clusters(nodes, server_round, barred)
        downloads = exchange.hand_out(clusters, arrays)
        if membership.failed:  # other sectors draw the same leader again
            barred |= membership.failed
            clusters = membership.draw_clusters(nodes, server_round, barred)
        log(INFO, "%s: leaders of the round: %s", type(self).__name__, [c.head for c in clusters])
        self.topology = Topology(clusters, groups=())
        messages = []
        for cluster in clusters:
            routes = exchange.routes_to(cluster.head, cluster.members)
            exchange.settle_coding((cluster.head, *routes))
            for node in (cluster.head, *routes):
                settings = {**config, SERVER_ROUND: server_round, LEADS: node == cluster.head}
                content = RecordDict({CONFIG: ConfigRecord(settings)})
                content.update(downloads.get(node, {ARRAYS: arrays}))
                content.update(exchange.codings[node])
                if node in routes:
                    content[ROUTE] = routes[node]
                messages.append(Message(content, node, TRAIN_SECTOR))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average sectors, distil in each, and average again (steps 2 to 5)."""
        replies = usable(replies)
        num_examples, metrics = self._trained(replies)
        able = [reply for reply in replies if reply.metadata.src_node_id in num_examples]
        means = SectorMeans(
            self._exchange, self._norms, self.settings, self.seed, server_round, num_examples
        )
        clusters = list(self.topology.clusters) if self.topology else []
        clusters, sectors = means.of(clusters, self._exchange.deliveries(able))
        self.topology = Topology(tuple(clusters), groups=())
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
        """Restore the state; see `CheckedFedAvg.load_state_dict`."""
        check_tag(state, self)
        self._membership.load_state_dict(state)
        self._norms.load_state_dict(state)

    def combine(self, server_round: int, sectors: list[Weighted]) -> Arrays:
        """Step 5: ``w = sum_m p_m z_m``."""
        return weighted_mean(sectors)

    def _trained(self, replies: list[Message]) -> tuple[dict[int, int], MetricRecord]:
        """Samples of each node that trained, and the mean loss; notes the norms of updates."""
        losses: dict[int, float] = {}
        norms: dict[int, float] = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            try:
                losses[node], norms[node] = number(reply, TRAIN_LOSS), number(reply, UPDATE_NORM)
            except ValueError as error:
                self._set_aside(node, TRAIN_SECTOR, str(error))
        for node, reason in self._norms.begin_round(norms).items():
            self._set_aside(node, TRAIN_SECTOR, reason)
        if self.settings.rule == "agreement":
            long = far_longer(self._norms.of_round, self._num_examples)
            for node in long:
                self._set_aside(node, TRAIN_SECTOR, "its norm is far above most nodes'")
            self._norms.exclude(long)
        num_examples = {node: self._num_examples[node] for node in self._norms.of_round}
        loss = sum(count * losses[node] for node, count in num_examples.items())
        return num_examples, MetricRecord({TRAIN_LOSS: loss / max(sum(num_examples.values()), 1)})

    def _distil_sectors(
        self, server_round: int, sectors: Mapping[int, Weighted], mean: Arrays
    ) -> dict[int, Arrays]:
        """Step 4. z_m of each sector whose leader succeeded."""
        request = self.settings.ensemble_distillation.model_dump(by_alias=True)
        content = RecordDict(
            {
                ARRAYS: as_record(mean),
                CONFIG: ConfigRecord(
                    {**request, SERVER_ROUND: server_round, MIN_GAIN: self.settings.least_gain}
                ),
            }
        )
        clusters = self.topology.clusters if self.topology else ()
        narrow = self._membership.narrow_leaders(clusters, self.settings.least_classes)
        if narrow:
            text = "%s: sectors of nodes %s keep their plain averages: these have few classes"
            log(INFO, text, type(self).__name__, listed([str(node) for node in narrow]))
        able = [leader for leader in sectors if leader not in narrow]
        replies = self._exchange.ask([Message(content, leader, DISTILL_SECTOR) for leader in able])
        distilled = {}
        for leader in able:
            if leader in replies and ARRAYS not in replies[leader].content:
                why = "its ensemble is no better"
                log(INFO, "Sector of node %d keeps its plain average: %s", leader, why)
                continue
            try:
                student = self._exchange.model_of(replies[leader])
            except (KeyError, ValueError) as error:
                log(WARNING, "Sector of node %d keeps its plain average: %s", leader, error)
                self._membership.fail(leader)
                continue
            try:
                self._norms.check_student(leader, student, mean)
            except ValueError as error:
                self._set_aside(leader, DISTILL_SECTOR, str(error))
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
            self._set_aside(leader, DISTILL_SECTOR, "its student points away from the others")
        return agreed

    def _set_aside(self, node: int, phase: str, reason: str) -> None:
        set_aside(self._exchange.grid, node, phase, one_line(reason))


def formulas(
    strategy: FedHEAD, num_nodes: int, num_weights: int, num_rounds: int
) -> dict[str, int]:
    """Bits of a run by formula, for the report; empty before there are sectors."""
    if not strategy.topology:
        return {}
    sectors = len(strategy.topology.clusters)
    return {"fedhead (FedHEAD, table 1)": fedhead_bits(sectors, num_weights, num_rounds)}


def fedhead_bits(num_sectors: int, num_weights: int, num_rounds: int) -> int:
    """Traffic of FedHEAD through the server: ``2 M T`` round trips (FedHEAD, table 1).

    Only leaders exchange models with the server, however many nodes there are: w and w_m, z and
    z_m in each round.
    """
    return 4 * num_sectors * num_rounds * num_weights * BITS_PER_FLOAT
