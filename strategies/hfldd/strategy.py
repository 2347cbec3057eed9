"""HFLDD: heterogeneous clusters by soft labels, distilled data to heads, FedAvg among heads."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from logging import INFO, WARNING
from statistics import median
from typing import Any, Self

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flwr_distill.base.text import counted, listed
from flwr_distill.distill.private_matching import check_shape
from flwr_distill.links.records import LinkMode
from flwr_distill.protocol.arrays import Arrays, as_arrays, as_record, sent_arrays
from flwr_distill.protocol.meeting import one_line
from flwr_distill.protocol.messages import CONFIG, METRICS, SERVER_ROUND
from flwr_distill.protocol.replies import NothingUsableError, number, set_aside, usable
from flwr_distill.strategies.common.checked import RobustFedAvg, Update
from flwr_distill.strategies.common.directory import Directory
from flwr_distill.strategies.common.images import chosen_formation
from flwr_distill.strategies.common.run import Run
from flwr_distill.strategies.common.topology import FlatClusters, Topology
from flwr_distill.strategies.common.waiting import connected_nodes
from flwr_distill.strategies.hfldd.clusters import Clusters
from flwr_distill.strategies.hfldd.exchange import Exchange
from flwr_distill.strategies.hfldd.heads import Heads, virtual_share
from flwr_distill.strategies.hfldd.method import (
    AVERAGE_LAST,
    BALANCED,
    LABEL_KNOWLEDGE,
    LEFT_OUT,
    NUM_PARCELS,
    OWN_DIVERGENCE,
    TRAIN_POOL,
    VIRTUAL_SHARE,
    HFLDDSettings,
    soft_labels_of,
)
from flwr_distill.strategies.hfldd.requests import LabelRequest
from flwr_distill.strategies.hfldd.round_mean import RoundMean
from flwr_distill.strategies.hfldd.traffic import hfldd_bits
from flwr_distill.strategies.hfldd.voting import hold_vote
from flwr_distill.task.errors import SettingsError

MAX_CLUSTERS_NAMED = 3
FEW_HEADS = 0.25
"""Share of the nodes: where no more train, their virtual data must stand for the others."""
FEW_CLASSES = 0.25
"""Share of the classes: who has no more needs virtual data of the others."""


class HFLDD(RobustFedAvg):
    """Hybrid federated learning based on dataset distillation (HFLDD).

    Before the first round, every node sends soft labels on a global auxiliary set. Nodes with
    similar labels form homogeneous groups (K-means on the KL matrix). Each cluster takes nodes of
    each group, so that it sees every class (algorithm 1, but for `complete_clusters`). A random
    node of a cluster is its head; the members distil their data and send them to it. Then only the
    heads train, on their own and their members' data. The server averages their models by
    ``|D_h|``. In the next round another node of each cluster is its head (`rotate`, not in the
    paper).

    A head that disconnects or fails is replaced by another node of its cluster, to which the others
    send their virtual data again. A member whose data did not arrive sends them when it is back. A
    new node joins the cluster with the fewest nodes of its homogeneous group. Where members refine
    their virtual data (`refresh_every`, not in the paper), heads train on the old ones until new
    ones arrive.

    Parameters
    ----------
    links : str (default: "auto")
        How members send to heads: ``relay`` (through the server, sealed), ``direct`` or ``auto``
        (direct where that works).
    phase_timeout : float (default: 600.0)
        Seconds to wait for replies in each phase before the first round.
    seed : int (default: 0)
        Seed of K-means, of the clusters and of the choice of heads.
    directory : Directory, optional (default: None)
        Descriptions of known nodes; None starts an empty one.
    image_shape : tuple of int, optional (default: None)
        (C, H, W) of what nodes train on (`task.backbones.seen_spec`), which bounds the bytes that
        members send; None leaves only the general bound of links.
    num_classes : int, optional (default: None)
        Classes of the task, which soft labels must have; None takes what most nodes send.
    num_rounds : int (default: 0)
        Rounds of the run as it began, over whose first half virtual data fade with ``heads="all"``;
        with 0 they stay.
    **kwargs
        Settings (`strategies.hfldd.method.HFLDDSettings`), and what Flower's FedAvg takes. Its
        sampling of training nodes is used with ``heads="all"``.

    Notes
    -----
    Source: "Dataset Distillation-based Hybrid Federated Learning on Non-IID Data" (arXiv
    2409.17517); letters are the paper's.
    """

    settings: HFLDDSettings = HFLDDSettings()
    run_arguments = ("links", "phase_timeout", "seed", "directory", "aggregator", "num_rounds")

    def __init__(
        self,
        *,
        links: LinkMode = "auto",
        phase_timeout: float = 600.0,
        seed: int = 0,
        directory: Directory | None = None,
        image_shape: tuple[int, ...] | None = None,
        num_classes: int | None = None,
        num_rounds: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._num_rounds = num_rounds
        self._virtual_share = 1.0
        self._samples: Mapping[int, int] = {}
        self.num_classes = num_classes
        self.phase_timeout = phase_timeout
        self.labels: dict[int, NDArray[Any]] = {}
        """Soft labels (|D_g|, classes) of nodes that are in no cluster yet, by node."""
        self._noise: dict[int, float] = {}
        self._alone = False
        self._directory = directory or Directory()
        self._clusters = Clusters(seed)
        self._mean = RoundMean()
        self._exchange = Exchange(
            self._clusters, self._directory, self.settings, links, phase_timeout, image_shape
        )
        self._heads = Heads(self._clusters, self._directory, self._exchange)
        self.all_train = self.settings.heads == "all"
        """Whether all nodes of a cluster train, rather than one; to be set before the first round,
        to True only if neither ``votes`` nor ``refresh_every`` is on."""
        if image_shape is not None:
            chosen_formation("hfldd.formation", self.settings.formation, image_shape)
        if self.settings.share_raw_data:
            log(WARNING, "share_raw_data is on: members send their RAW DATA to cluster heads")
        if self.settings.start == "real":
            log(WARNING, 'start = "real": members send nearly unchanged REAL IMAGES')

    @classmethod
    def from_run(cls, settings: HFLDDSettings, run: Run, **arguments: Any) -> Self:
        """Make the strategy for a run of our ServerApp; see `strategies.common.run.Run`.

        Raises SettingsError if a setting needs virtual images and nodes train on features, or
        single models and the run has secure sums; DistillError if it needs images.
        """
        if run.seen_spec != run.spec:
            _check_features(settings)
        elif settings.dp_epsilon:
            check_shape(run.spec.shape, "hfldd.dp-epsilon", settings.dp_epsilon)
        if run.secure_sums:
            _check_summed(settings)
        own = {"image_shape": run.seen_spec.shape, "num_classes": run.spec.num_classes}
        return super().from_run(settings, run, **{**own, **arguments})

    def check_nodes(self, num_nodes: int) -> None:
        """Raise SettingsError if there are fewer nodes than groups."""
        if (groups := self.settings.groups) > num_nodes:
            raise SettingsError(
                f"there are {counted(num_nodes, 'node')}",
                where="hfldd.groups",
                value=groups,
                remedy=f"set it to at most {num_nodes}, or 0 to have it chosen",
            )

    def summary(self) -> None:
        """Log summary configuration of the strategy."""
        log(INFO, "\t├──> HFLDD settings:")
        log(INFO, "\t│\t├── Groups: %s", self.settings.groups or "by silhouette")
        log(INFO, "\t│\t├── Label knowledge: %s", self.settings.label_knowledge)
        log(INFO, "\t│\t└── Distillation: %s", self.settings.distillation)
        super().summary()

    @property
    def topology(self) -> Topology | FlatClusters | None:
        """The current clusters; None before they are formed."""
        if not self._clusters:
            return None
        if self.all_train:
            return FlatClusters(tuple(tuple(cluster.nodes) for cluster in self._clusters))
        return self._clusters.topology

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Form the clusters, or later update them; then have the heads train."""
        self.start_of_round, self.grid = as_arrays(arrays), grid
        forming = not self._clusters
        if forming:
            self._form_clusters(grid)
        else:
            self._place_new_nodes(server_round, grid)
        if self.all_train:
            sampled = super().configure_train(server_round, arrays, config, grid)
            nodes = [message.metadata.dst_node_id for message in sampled]
            share = virtual_share(server_round, self._num_rounds)
            heads = self._heads.each_of(
                nodes, server_round, arrays, grid, complete=share > 0, forming=forming
            )
            how: dict[str, Any] = {VIRTUAL_SHARE: share}
            self._virtual_share = share
        else:
            rotate = self.settings.rotate
            heads = self._heads.one_a_cluster(
                server_round, arrays, grid, rotate=rotate, forming=forming
            )
            how = {BALANCED: self.settings.balanced}
        self._samples = self._directory.samples({*grid.get_node_ids(), *heads})
        self._alone = len(heads) == 1 and not self.all_train
        if self._alone and self.settings.average_rounds:
            self.start_of_round = self._mean.start(self.start_of_round)
            arrays = as_record(self.start_of_round)
        how[AVERAGE_LAST] = self.settings.average_last if self._alone else 0.0
        config = ConfigRecord({**config, SERVER_ROUND: server_round, **how})
        clusters = self._clusters.by_node()
        messages = []
        for head in heads:
            ranks = clusters[head].ranks(clusters[head].left_out)
            own = ConfigRecord({**config, LEFT_OUT: ranks}) if ranks else config
            record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: own})
            messages.append(Message(record, head, TRAIN_POOL))
        return messages

    def read(self, reply: Message) -> Update:
        """Read and check a head's reply; it counts for no more samples than it can have."""
        update = super().read(reply)
        members = self._clusters.virtual_data_of(update.node)
        most = self._exchange.limits.pool(update.node, members, self._samples, self._virtual_share)
        return replace(update, num_examples=min(update.num_examples, most))

    def combine(self, updates: list[Update]) -> Arrays:
        """Average the heads' models; note which heads failed or lost virtual data."""
        self._clusters.failed -= {update.node for update in updates}
        for update in updates:
            members = self._clusters.virtual_data_of(update.node)
            num_parcels = update.reply.content.metric_records[METRICS].get(NUM_PARCELS)
            if isinstance(num_parcels, int) and num_parcels < len(members):
                log(WARNING, "Head %d lost virtual data; members send them again", update.node)
                self._directory.forget(update.node)  # it may have lost its key as well
                self._clusters.lost(update.node)
                self._exchange.lost(update.node, members, self._server_round)
        if self.settings.votes:
            models = {update.node: update.arrays for update in updates}
            hold_vote(
                self._clusters,
                models,
                self._directory,
                self.grid,
                self._server_round,
                self.phase_timeout,
            )
        model = super().combine(updates)
        return self._mean.add(model) if self._alone and self.settings.average_rounds else model

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, besides the global model."""
        return {
            **super().state_dict(),
            **self._clusters.state_dict(),
            **self._exchange.state_dict(),
            **self._mean.state_dict(),
            "num-rounds": self._num_rounds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; see `CheckedFedAvg`."""
        super().load_state_dict(state)
        self._clusters.load_state_dict(state)
        self._exchange.load_state_dict(state)
        self._mean.load_state_dict(state)
        self._num_rounds = state["num-rounds"]

    def expected_bits(self, num_weights: int, num_rounds: int) -> int:
        """Traffic of a run by the paper's eq. 18; 0 before clusters are formed."""
        if not self._clusters:
            return 0
        return hfldd_bits(
            num_clients=len(self._clusters.nodes),
            num_auxiliary=self.settings.auxiliary_size,
            num_classes=self._clusters.label_shape[-1],
            distilled_values=self._exchange.distilled_values,
            bits_per_value=self.settings.bits_sent,
            models_to_members=self._exchange.models_to_members,
            num_heads=len(self._clusters.nodes if self.all_train else self._clusters),
            num_weights=num_weights,
            num_rounds=num_rounds,
        )

    def _form_clusters(self, grid: Grid) -> None:
        """Label knowledge, groups and clusters (steps 1 to 3)."""
        nodes = connected_nodes(grid, self.min_available_nodes, self.phase_timeout)
        self.ask_labels(nodes, grid)
        if not (soft_labels := self.labels):
            asked = counted(len(nodes), "node")
            raise NothingUsableError(f"0 of {asked} sent usable soft labels")
        links = self._exchange.links(grid, soft_labels)
        able = {node: labels for node, labels in soft_labels.items() if node in links}
        if not able:
            raise NothingUsableError(f"0 of {counted(len(soft_labels), 'node')} introduced itself")
        noise = {node: self._noise[node] for node in able if node in self._noise}
        known = self._directory.look_up(grid, able, self.phase_timeout).values()
        stated = {frozenset(about.classes) for about in known if about.classes is not None}
        self._clusters.form(
            able,
            self.settings.groups or None,
            noise,
            complete=self.settings.complete_clusters,
            differing=len(stated) > 1,
        )
        self.labels, self._noise = {}, {}
        self._warn_of_missing_classes(grid)

    def ask_labels(self, nodes: Sequence[int], grid: Grid) -> None:
        """Step 1. Add soft labels of nodes to `labels`, and note their own divergences.

        Nodes whose soft labels are there get no request; `labels` then has usable ones of
        connected `nodes` alone.
        """
        self.grid = grid
        self.labels = {node: labels for node, labels in self.labels.items() if node in nodes}
        nodes = [node for node in nodes if node not in self.labels]
        if not nodes:
            return
        log(INFO, "HFLDD: asking %s for label knowledge", counted(len(nodes), "node"))
        forming = not self._clusters and not self.settings.groups
        request = LabelRequest(**self.settings.label_knowledge.model_dump(), own_divergence=forming)
        soft_labels: dict[int, NDArray[Any]] = {}
        messages = self._construct_messages(
            RecordDict({CONFIG: ConfigRecord(request.model_dump(by_alias=True))}),
            nodes,
            LABEL_KNOWLEDGE,
        )
        for reply in usable(grid.send_and_receive(messages, timeout=self.phase_timeout)):
            node = reply.metadata.src_node_id
            try:
                soft_labels[node] = soft_labels_of(sent_arrays(reply))
            except ValueError as error:
                self.set_aside(reply, one_line(error))
            with suppress(ValueError):
                self._noise[node] = max(number(reply, OWN_DIVERGENCE), 0.0)
        shapes = [labels.shape for labels in (*self.labels.values(), *soft_labels.values())]
        shape: tuple[int, ...] = max(shapes, key=shapes.count, default=())
        if self._clusters:
            shape = self._clusters.label_shape
        elif self.num_classes:
            shape = (self.settings.auxiliary_size, self.num_classes)
        for node, labels in soft_labels.items():
            if labels.shape != shape:
                reason = f"its soft labels are {labels.shape}, not {shape}"
                set_aside(grid, node, LABEL_KNOWLEDGE, reason)
        self.labels |= {n: labels for n, labels in soft_labels.items() if labels.shape == shape}

    def _warn_of_missing_classes(self, grid: Grid) -> None:
        """Warn of clusters that miss classes that other nodes have, if all nodes report theirs."""
        nodes = self._clusters.nodes
        about = self._directory.look_up(grid, nodes, self.phase_timeout)
        held = {node: about[node].classes for node in nodes}
        if not self.all_train:
            self._say_if_few_train({node: classes for node, classes in held.items() if classes})
        missing = self._clusters.missing_classes(held)
        if missing:
            names = {
                head: [self._directory.class_name(label) for label in labels]
                for head, labels in missing.items()
            }
            lines = [f"that of node {head} is missing {listed(names[head])}" for head in missing]
            text = (
                "%d of %s cannot see all classes that nodes have "
                "(fewer, larger clusters would: %s): %s"
            )
            clusters, named = counted(len(self._clusters), "cluster"), lines[:MAX_CLUSTERS_NAMED]
            remedy = "raise hfldd.groups"
            if not self.settings.complete_clusters:
                remedy = "set hfldd.complete-clusters to true"
            log(WARNING, text, len(missing), clusters, remedy, "; ".join(named))

    def _say_if_few_train(self, held: Mapping[int, Collection[int]]) -> None:
        """Say so if few of many nodes train that could do well without virtual data."""
        num_classes, heads = self._clusters.label_shape[-1], len(self._clusters)
        usual = median(len(set(classes)) for classes in held.values()) if held else 0
        if heads <= FEW_HEADS * len(held) and usual > FEW_CLASSES * num_classes:
            log(
                INFO,
                "HFLDD: %d of %s train a round, and a node has %g of %d classes. Where virtual "
                "data say little, as of photographs, training on all nodes may learn more (set "
                'hfldd.heads to "all")',
                heads,
                counted(len(held), "node"),
                usual,
                num_classes,
            )

    def _place_new_nodes(self, server_round: int, grid: Grid) -> None:
        """Have new nodes join clusters."""
        connected = list(grid.get_node_ids())
        waiting = self._clusters.not_placed(connected)
        new = [node for node in waiting if self._exchange.retries.due(node, server_round)]
        self._directory.look_up(grid, new, self.phase_timeout)
        new = self._clusters.restore_places(new, connected, self._directory.data)
        if not new:
            return
        self.ask_labels(new, grid)
        for node in new:
            if node in self.labels:
                self._clusters.place(node, self.labels[node])
            else:
                self._exchange.retries.failed(node, server_round)


def _check_features(settings: HFLDDSettings) -> None:
    """Refuse settings that are of no use where members send features."""
    for name, value, reason in (
        ("network", settings.network, "it would see features, no images"),
        ("dp-epsilon", settings.dp_epsilon, "features have no differential privacy here"),
        ("refresh-every", settings.refresh_every, "training does not change features"),
    ):
        if value:
            raise SettingsError(
                "nothing but the head of the frozen network trains, so members send features, and "
                f"{reason}",
                where=f"hfldd.{name}",
                value=value,
                remedy='leave it out, or set backbone.trains to "last-block"',
            )


def _check_summed(settings: HFLDDSettings) -> None:
    """Refuse settings that need heads' single models."""
    for name, value, reason in (
        ("votes", settings.votes, "each head's model votes by itself"),
        (
            "complete-clusters",
            settings.complete_clusters and settings.heads != "all",
            "heads may be too few to hide a model",
        ),
    ):
        if value:
            raise SettingsError(
                f"not with secure-sums = true: {reason}",
                where=f"hfldd.{name}",
                value=value,
                remedy="set it to false",
            )
