"""HFLDD: heterogeneous clusters by soft labels, distilled data to heads, FedAvg among heads."""

from collections.abc import Iterable
from logging import INFO, WARNING

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from flwr.serverapp.strategy.strategy_utils import sample_nodes
from numpy.typing import NDArray

from strategies.clustering import heterogeneous_clusters, homogeneous_groups, kl_matrix
from strategies.links import Links
from strategies.replies import number, usable
from strategies.topology import Cluster, Topology
from strategies.traffic import hfldd_bits
from task.links import VIRTUAL_DATA, LinkMode
from task.messages import (
    ARRAYS,
    CONFIG,
    DISTILL,
    LABEL_KNOWLEDGE,
    METRICS,
    PARCEL,
    RECEIVE,
    ROUTE,
    SERVER_ROUND,
    SOFT_LABELS,
    TRAIN_ON,
)
from task.requests import Distillation, LabelKnowledge
from task.settings import Block


class HFLDD(FedAvg):
    """Hierarchical federated learning with data distillation.

    Before the first round, every node sends soft labels on a global auxiliary set; nodes of like
    labels form homogeneous groups (K-means on the KL matrix), and clusters take one node of each
    group, so that a cluster sees every class (algorithm 1). One random node of each cluster is its
    head; the members distil their data and send it there. Then only the heads train, each on its
    own data and what it received, and the server averages them by ``|D_h|``.

    Parameters
    ----------
    groups : int, optional (default: None)
        K, the homogeneous groups. Lowered where there are fewer distinct nodes; if None, the K with
        the best silhouette.
    label_knowledge : LabelKnowledge, optional (default: None)
        How nodes take soft labels (E_1, D_g); None takes the defaults.
    distillation : Distillation, optional (default: None)
        How members distil, and how much they send; None takes the defaults.
    balanced : bool (default: True)
        Whether heads draw classes evenly from D_h, whose own class otherwise dominates.
    links : str (default: "auto")
        How members send to heads: ``relay`` (through the server, sealed), ``direct`` (from node to
        node) or ``auto`` (directly where that works).
    phase_timeout : float (default: 600.0)
        Seconds to wait for replies in each phase before the first round.
    seed : int (default: 0)
        Seed of K-means, of the clusters and of the choice of heads.
    min_available_nodes : int (default: 2)
        Nodes to wait for before clusters are formed.
    fraction_evaluate : float (default: 0.0)
        Share of all nodes that evaluate the global model each round.
    min_evaluate_nodes : int (default: 2)
        Fewest nodes that evaluate, where any do.

    Notes
    -----
    Source: "Hierarchical Federated Learning with Data Distillation"; letters are the paper's.
    """

    def __init__(
        self,
        *,
        groups: int | None = None,
        label_knowledge: LabelKnowledge | None = None,
        distillation: Distillation | None = None,
        balanced: bool = True,
        links: LinkMode = "auto",
        phase_timeout: float = 600.0,
        seed: int = 0,
        min_available_nodes: int = 2,
        fraction_evaluate: float = 0.0,
        min_evaluate_nodes: int = 2,
    ) -> None:
        super().__init__(
            fraction_evaluate=fraction_evaluate,
            min_evaluate_nodes=min_evaluate_nodes,
            min_available_nodes=min_available_nodes,
        )
        self.groups = groups
        self.label_knowledge = label_knowledge or LabelKnowledge()
        self.distillation = distillation or Distillation()
        self.balanced = balanced
        self.links = links
        self.phase_timeout = phase_timeout
        self.seed = seed
        self.topology: Topology | None = None
        self.num_classes = 0
        self.distilled_values = 0
        if self.distillation.share_raw_data:
            log(WARNING, "share_raw_data is on: members send their RAW DATA to cluster heads")
        if self.distillation.start == "real":
            log(WARNING, 'start = "real": members send much the same as REAL IMAGES')

    def summary(self) -> None:
        """Log summary configuration of the strategy."""
        log(INFO, "\t├──> HFLDD settings:")
        log(INFO, "\t│\t├── Groups: %s", self.groups or "by silhouette")
        log(INFO, "\t│\t├── Label knowledge: %s", self.label_knowledge)
        log(INFO, "\t│\t└── Distillation: %s", self.distillation)
        super().summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Form the clusters before the first round; then have the heads train."""
        if self.topology is None:
            self.topology = self._form_clusters(grid)
        connected = set(grid.get_node_ids())
        heads = [head for head in self.topology.heads if head in connected]
        if len(heads) < len(self.topology.heads):
            log(WARNING, "%d cluster heads are away", len(self.topology.heads) - len(heads))
        config = ConfigRecord(
            {**config, SERVER_ROUND: server_round, TRAIN_ON: "pooled", "balanced": self.balanced}
        )
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        return self._construct_messages(record, heads, MessageType.TRAIN)

    def expected_bits(self, num_weights: int, num_rounds: int) -> int:
        """Traffic that the paper's eq. 18 gives for the clusters as formed; 0 before that.

        Parameters
        ----------
        num_weights : int
            |w|, the values of the model.
        num_rounds : int
            T.
        """
        if self.topology is None:
            return 0
        return hfldd_bits(
            num_clients=sum(1 + len(cluster.members) for cluster in self.topology.clusters),
            num_auxiliary=self.label_knowledge.auxiliary_size,
            num_classes=self.num_classes,
            distilled_values=self.distilled_values,
            num_heads=len(self.topology.clusters),
            num_weights=num_weights,
            num_rounds=num_rounds,
        )

    def _form_clusters(self, grid: Grid) -> Topology:
        """Label knowledge, groups, clusters, distillation and hand-over (steps 1 to 4)."""
        _, nodes = sample_nodes(grid, self.min_available_nodes, self.min_available_nodes)
        soft_labels = self._collect_soft_labels(nodes, grid)
        links = Links.meet(grid, soft_labels, self.links, self.phase_timeout)
        topology = self._cluster({n: told for n, told in soft_labels.items() if n in links})
        deliveries = self._collect_deliveries(topology, links, grid)
        self._hand_over(topology, deliveries, grid)
        return topology

    def _collect_soft_labels(self, nodes: list[int], grid: Grid) -> dict[int, NDArray[np.floating]]:
        """Step 1. Soft labels (|D_g|, classes) of every node that gives usable ones."""
        log(INFO, "HFLDD: asking %d nodes for label knowledge", len(nodes))
        soft_labels = {}
        for reply in self._ask(self.label_knowledge, nodes, LABEL_KNOWLEDGE, grid):
            sent = reply.content.array_records.get(ARRAYS, ArrayRecord())
            labels = sent[SOFT_LABELS].numpy() if SOFT_LABELS in sent else np.empty(0)
            soft_labels[reply.metadata.src_node_id] = labels
        shapes = [labels.shape for labels in soft_labels.values()]
        for node, labels in list(soft_labels.items()):
            if labels.shape != max(shapes, key=shapes.count) or not _are_distributions(labels):
                log(WARNING, "Soft labels of node %d set aside: not distributions over D_g", node)
                del soft_labels[node]
        if not soft_labels:
            raise RuntimeError(
                f"none of {len(nodes)} nodes sent usable soft labels; the nodes' logs say why"
            )
        return soft_labels

    def _cluster(self, soft_labels: dict[int, NDArray[np.floating]]) -> Topology:
        """Steps 2 and 3. Homogeneous groups, heterogeneous clusters, and a head for each."""
        nodes = list(soft_labels)  # no array of them: ids of 64 bits would become floats
        stacked = np.stack(list(soft_labels.values()))
        self.num_classes = stacked.shape[-1]
        group_of = homogeneous_groups(kl_matrix(stacked), self.groups, self.seed)
        num_groups = int(group_of.max()) + 1
        if self.groups is not None and num_groups < self.groups:
            log(WARNING, "groups = %d lowered to %d distinct nodes", self.groups, num_groups)
        generator = np.random.default_rng(self.seed)
        clusters = []
        for cluster in heterogeneous_clusters(group_of, generator):
            head = int(generator.choice(cluster))
            members = tuple(nodes[i] for i in cluster if i != head)
            clusters.append(Cluster(head=nodes[head], members=members))
        groups = tuple(
            tuple(nodes[i] for i in np.flatnonzero(group_of == g)) for g in range(num_groups)
        )
        log(
            INFO,
            "HFLDD: %d groups, %d clusters of sizes %s",
            len(groups),
            len(clusters),
            [1 + len(c.members) for c in clusters],
        )
        return Topology(tuple(clusters), groups)

    def _collect_deliveries(
        self, topology: Topology, links: Links, grid: Grid
    ) -> dict[int, ConfigRecord]:
        """Step 4, members' side. What each member that distilled its data sends to its head."""
        routes = {
            member: links.route(member, head, VIRTUAL_DATA)
            for member, head in topology.head_of.items()
        }
        log(INFO, "HFLDD: %d members distil their data", len(routes))
        request = ConfigRecord(self.distillation.model_dump(by_alias=True))
        messages = [
            Message(RecordDict({CONFIG: request, ROUTE: route}), member, DISTILL)
            for member, route in routes.items()
        ]
        deliveries = {}
        for reply in usable(grid.send_and_receive(messages, timeout=self.phase_timeout)):
            member = reply.metadata.src_node_id
            try:
                parcel, values = reply.content.config_records[PARCEL], number(reply, "num-values")
                deliveries[member] = links.forward(routes[member], parcel)
            except (KeyError, ValueError) as error:
                log(WARNING, "Node %d sent no parcel: %s", member, error)
                continue
            self.distilled_values += int(values)
        return deliveries

    def _hand_over(
        self, topology: Topology, deliveries: dict[int, ConfigRecord], grid: Grid
    ) -> None:
        """Step 4, heads' side. Hand each head what its members sent."""
        messages = []
        for cluster in topology.clusters:
            sent = RecordDict(
                {
                    f"{PARCEL}.{rank}": deliveries[member]
                    for rank, member in enumerate(cluster.members)
                    if member in deliveries
                }
            )
            if sent:
                messages.append(Message(sent, cluster.head, RECEIVE))
        for reply in usable(grid.send_and_receive(messages, timeout=self.phase_timeout)):
            log(
                INFO,
                "HFLDD: head %d holds %s",
                reply.metadata.src_node_id,
                dict(reply.content.metric_records.get(METRICS, MetricRecord())),
            )

    def _ask(
        self, request: Block, nodes: list[int], message_type: str, grid: Grid
    ) -> list[Message]:
        """Send a request to all nodes; return the replies that carry content."""
        record = RecordDict({CONFIG: ConfigRecord(request.model_dump(by_alias=True))})
        messages = self._construct_messages(record, nodes, message_type)
        return usable(grid.send_and_receive(messages, timeout=self.phase_timeout))


def _are_distributions(labels: NDArray[np.floating]) -> bool:
    """Whether every row is finite, non-negative and sums to 1 (to 1e-3)."""
    return bool(
        labels.ndim == 2
        and np.isfinite(labels).all()
        and (labels >= 0).all()
        and np.allclose(labels.sum(axis=1), 1.0, atol=1e-3)
    )
