"""Strategies whose model passes through the nodes of groups; groups are averaged."""

from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from flwr_distill.base.text import counted
from flwr_distill.links.records import LinkMode
from flwr_distill.links.routes import Links
from flwr_distill.protocol.arrays import (
    Arrays,
    as_arrays,
    model_arrays,
    moved_into_record,
    sent_arrays,
)
from flwr_distill.protocol.meeting import one_line
from flwr_distill.protocol.messages import (
    ARRAYS,
    CONFIG,
    DELIVERY,
    LINK_ERROR,
    METRICS,
    PARCEL,
    REJECTED,
    ROUTE,
    SERVER_ROUND,
    TRAIN_LOSS,
)
from flwr_distill.protocol.outliers import absurdly_large, update_norm
from flwr_distill.protocol.parcels import codec_of_whole, coding_record
from flwr_distill.protocol.replies import number, set_aside, usable
from flwr_distill.strategies.common.averages import weighted_mean
from flwr_distill.strategies.common.checked import CheckedFedAvg
from flwr_distill.strategies.common.directory import Directory
from flwr_distill.strategies.common.retries import Retries
from flwr_distill.strategies.common.traffic import fedseq_bits
from flwr_distill.strategies.common.waiting import connected_nodes
from flwr_distill.task.errors import SettingsError
from flwr_distill_baselines.common.passing.messages import PASSED_MODEL, Turns

HEADER = 1024
"""Bytes that an array's name, type and shape may take in a parcel."""


@dataclass
class Chain:
    """A group of nodes in a round.

    Parameters
    ----------
    nodes : list[int]
        Its connected nodes, in the order in which they train.
    trained : list[int]
        Those whose training is in the model; the last of them has it.
    delivery : ConfigRecord, optional (default: None)
        The model, on its way to the next node; None if that gets the global model, or nothing yet.
    """

    nodes: list[int]
    trained: list[int] = field(default_factory=list)
    delivery: ConfigRecord | None = None

    def restart(self) -> None:
        """Have the next node start from the global model."""
        self.trained, self.delivery = [], None


class SequentialStrategy(CheckedFedAvg):
    """Sequential training in groups of nodes, which are averaged by their samples.

    In each round the global model passes through the nodes of every group: each trains it and sends
    it to the next one over a link, the last one to the server. A subclass forms the groups (`form`)
    and says in which order their nodes train (`order`).

    If a node fails, the one before it sends its model to the one after it. If that is gone too, or
    a node rejects the model, the next one starts from the global model.

    Parameters
    ----------
    links : str (default: "auto")
        How nodes send to each other: ``relay`` (through the server, sealed), ``direct`` or ``auto``
        (direct where that works).
    phase_timeout : float (default: 600.0)
        Seconds to wait for each node of a group.
    seed : int (default: 0)
        Seed of the groups that train in a round, and of what a subclass draws.
    directory : Directory, optional (default: None)
        Descriptions of known nodes; None starts an empty one.
    up_codec : str (default: "float32")
        The run's codec of what nodes send, by which they pass the model on.
    norm_threshold : float (default: 5.0)
        Score above which a norm is absurd; see `protocol.outliers.absurdly_large`.
    **kwargs
        The method's settings, and what Flower's FedAvg takes; ``fraction_train`` is the share of
        groups that train.
    """

    turns: ClassVar[Turns]
    """Message types of the method."""
    run_arguments: ClassVar[tuple[str, ...]] = (
        *("links", "phase_timeout", "seed", "directory", "norm_threshold", "up_codec"),
    )

    def __init__(
        self,
        *,
        links: LinkMode = "auto",
        phase_timeout: float = 600.0,
        seed: int = 0,
        directory: Directory | None = None,
        norm_threshold: float = 5.0,
        up_codec: str = "float32",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.up_codec = up_codec
        self.links = links
        self.phase_timeout = phase_timeout
        self.seed = seed
        self.norm_threshold = norm_threshold
        self.groups: list[list[int]] = []
        """Node ids of each group."""
        self._retries = Retries()
        self._directory = directory or Directory()
        self._chains: list[Chain] = []
        self._losses: dict[int, float] = {}
        self._num_examples: dict[int, int] = {}
        self._round = 0
        self._routes: Links
        self._config: ConfigRecord
        self._arrays: ArrayRecord

    @abstractmethod
    def form(self, server_round: int) -> None:
        """Form `groups` of the connected nodes, or have new nodes join them."""

    @abstractmethod
    def order(self, group: list[int], draws: np.random.Generator) -> list[int]:
        """Order in which the connected nodes of a group train in a round."""

    def send_off(self) -> None:
        """Do what comes before the first nodes of the round's chains train; by default nothing."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Form or complete the groups; have all but the last nodes of each train in turn."""
        self.start_of_round = as_arrays(arrays)
        self.grid, self._round, self._arrays = grid, server_round, arrays
        self._config = ConfigRecord({**config, SERVER_ROUND: server_round})
        self._losses = {}
        if not self.groups:
            connected_nodes(grid, self.min_available_nodes, self.phase_timeout)
        self.form(server_round)
        nodes = self._meet()
        self._chains = self._drawn(nodes, server_round)
        log(INFO, "FedSeq: %s train in turn", counted(len(self._chains), "group"))
        self.send_off()
        for left in range(max((len(c.nodes) for c in self._chains), default=0), 1, -1):
            # Chains end together, so that all models reach the server in one phase.
            self._step([chain for chain in self._chains if len(chain.nodes) >= left], left)
        self._pass_again(self._chains, 1)
        messages = (self._message(chain, 1, self.turns.last) for chain in self._chains)
        return [message for message in messages if message is not None]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the models of the groups."""
        by_node = {reply.metadata.src_node_id: reply for reply in usable(replies)}
        last: list[tuple[Chain, Message]] = []
        holders: dict[int, Chain] = {}
        for chain in self._chains:
            reply = by_node.get(chain.nodes[-1])
            if reply is None:
                self._retries.failed(chain.nodes[-1], server_round)
            elif self._has_trained(chain, reply):
                last.append((chain, reply))
                continue
            if chain.trained:
                holders[chain.trained[-1]] = chain
        messages = [Message(RecordDict(), node, self.turns.again) for node in holders]
        last += [(holders[node], reply) for node, reply in self._ask(messages).items()]
        models = self._models_of(last)
        if not models:
            log(WARNING, "Round %d: no group has a model, the global one stays", server_round)
            return None, None
        counts = {node: self._num_examples[node] for node in self._losses}
        loss = sum(counts[node] * self._losses[node] for node in counts)
        metrics = MetricRecord({TRAIN_LOSS: loss / sum(counts.values())} if counts else {})
        return moved_into_record(weighted_mean(models)), metrics

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, besides the global model."""
        return {
            **super().state_dict(),
            "groups": [list(group) for group in self.groups],
            "retries": self._retries.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; see `CheckedFedAvg`."""
        super().load_state_dict(state)
        self.groups = [list(group) for group in state["groups"]]
        self._retries = Retries(state["retries"])

    def _meet(self) -> list[int]:
        """Connected nodes of the groups that others can send to.

        A node that fails repeatedly has its turn in ever fewer rounds: all others wait for it.
        """
        members = {node for group in self.groups for node in group}
        connected = [node for node in self.grid.get_node_ids() if node in members]
        about = self._directory.look_up(self.grid, connected, self.phase_timeout)
        introductions = {n: d.introduction for n, d in about.items() if d.introduction}
        self._routes = Links(introductions, self.links)
        self._num_examples = self._directory.samples(self.grid.get_node_ids())
        return [
            node
            for node in connected
            if node in introductions
            and node in self._num_examples
            and self._retries.due(node, self._round)
        ]

    def _drawn(self, nodes: Collection[int], server_round: int) -> list[Chain]:
        """The groups that train in the round."""
        draws = np.random.default_rng([self.seed, server_round])
        groups = [[node for node in group if node in nodes] for group in self.groups]
        groups = [group for group in groups if group]
        count = max(1, int(self.fraction_train * len(groups))) if self.fraction_train else 0
        chosen = sorted(draws.permutation(len(groups))[:count].tolist())
        return [Chain(self.order(groups[place], draws)) for place in chosen]

    def _step(self, chains: list[Chain], left: int) -> None:
        """Have the next node of each chain train, with so many left in it, and pass the model."""
        self._pass_again(chains, left)
        messages: list[Message] = []
        routes: dict[int, ConfigRecord] = {}
        for chain in chains:
            message = self._message(chain, left, self.turns.in_turn)
            if message is None:
                continue
            node, following = chain.nodes[-left], chain.nodes[1 - left]
            if (route := self._route(node, following)) is not None:
                message.content.update(self._with_coding(route))
                routes[node] = route
            messages.append(message)
        replies = self._ask(messages)
        for chain in chains:
            chain.delivery = None
            node = chain.nodes[-left]
            if (reply := replies.get(node)) is None:
                self._retries.failed(node, self._round)
            elif self._has_trained(chain, reply):
                chain.delivery = self._delivery(reply, routes.get(node))

    def _pass_again(self, chains: list[Chain], left: int) -> None:
        """Have the model passed to the next node of each chain to which none is on its way."""
        waiting: dict[int, Chain] = {}
        routes: dict[int, ConfigRecord] = {}
        for chain in chains:
            if not chain.trained or chain.delivery is not None:
                continue
            holder, node = chain.trained[-1], chain.nodes[-left]
            if (route := self._route(holder, node)) is not None:
                waiting[holder], routes[holder] = chain, route
        messages = [
            Message(RecordDict({**self._with_coding(routes[n])}), n, self.turns.again)
            for n in waiting
        ]
        replies = self._ask(messages)
        for holder, chain in waiting.items():
            if holder in replies:
                chain.delivery = self._delivery(replies[holder], routes[holder])
            else:
                log(WARNING, "Node %d is gone with its group's model", holder)
                chain.restart()

    def _message(self, chain: Chain, left: int, message_type: str) -> Message | None:
        """The message to a chain's next node; None if the model cannot reach that."""
        if chain.trained and chain.delivery is None:
            return None
        content = RecordDict({CONFIG: self._config})
        if chain.delivery is None:
            content[ARRAYS] = self._arrays
        else:
            content[DELIVERY] = chain.delivery
        return Message(content, chain.nodes[-left], message_type)

    def _has_trained(self, chain: Chain, reply: Message) -> bool:
        """Note that a node trained; if it rejects the model, restart the chain."""
        node = reply.metadata.src_node_id
        metrics = reply.content.metric_records.get(METRICS, MetricRecord())
        if REJECTED in metrics:
            log(WARNING, "Node %d rejects its group's model, which restarts", node)
            chain.restart()
            return False
        if TRAIN_LOSS in metrics:
            try:
                self._losses[node] = number(reply, TRAIN_LOSS)
            except ValueError as error:
                self.set_aside(reply, one_line(error))
                return False
        chain.trained.append(node)
        return True

    def _delivery(self, reply: Message, route: ConfigRecord | None) -> ConfigRecord | None:
        """The node's parcel as a delivery for the next one; None if it sent none."""
        node, parcel = reply.metadata.src_node_id, reply.content.config_records.get(PARCEL)
        if parcel is None or route is None:
            report = reply.content.config_records.get(CONFIG, ConfigRecord())
            reason = one_line(report.get(LINK_ERROR, "it had no route"))
            log(WARNING, "Node %d passed no model: %s", node, reason)
            return None
        try:
            return self._routes.forward(route, parcel)
        except ValueError as error:
            self.set_aside(reply, one_line(error))
            return None

    def _route(self, sender: int, receiver: int) -> ConfigRecord | None:
        """A route for the model; None if there is none, which in the first round is an error."""
        largest = sum(array.nbytes + HEADER for array in self.start_of_round.values())
        try:
            return self._routes.route(sender, receiver, PASSED_MODEL, largest)
        except SettingsError as error:
            if self._round == 1:  # the user can still change the setting
                raise
            log(WARNING, "Node %d cannot send to node %d: %s", sender, receiver, error)
            return None

    def _with_coding(self, route: ConfigRecord) -> dict[str, ConfigRecord]:
        """Records by which a node sends the model along a route."""
        ends = self._directory.codecs(int(str(route[end])) for end in ("sender", "receiver"))
        return {ROUTE: route, **coding_record(codec_of_whole(self.up_codec), ends)}

    def _models_of(self, last: Iterable[tuple[Chain, Message]]) -> list[tuple[float, Arrays]]:
        """Models of groups with their samples, without those that cannot be averaged."""
        models: dict[int, tuple[float, Arrays]] = {}
        for chain, reply in last:
            node = reply.metadata.src_node_id
            try:
                arrays = model_arrays(sent_arrays(reply), self.start_of_round)
            except ValueError as error:
                self.set_aside(reply, one_line(error))
                continue
            models[node] = sum(self._num_examples[each] for each in chain.trained), arrays
        # The grid compares last nodes' models with the run's first one, and holders' not at all.
        norms = {n: update_norm(arrays, self.start_of_round) for n, (_, arrays) in models.items()}
        for node in absurdly_large(norms, self.norm_threshold):
            set_aside(self.grid, node, self.turns.last, "its norm is beyond norm-threshold")
            del models[node]
        return list(models.values())

    def _ask(self, messages: list[Message]) -> dict[int, Message]:
        """Usable replies by node, in the order of the messages."""
        if not messages:
            return {}
        replies = usable(self.grid.send_and_receive(messages, timeout=self.phase_timeout))
        by_node = {reply.metadata.src_node_id: reply for reply in replies}
        nodes = (message.metadata.dst_node_id for message in messages)
        return {node: by_node[node] for node in nodes if node in by_node}


def formulas(strategy: Any, num_nodes: int, num_weights: int, num_rounds: int) -> dict[str, int]:
    """Bits of a run by the formula of HFLDD's paper; none before groups are formed."""
    if not strategy.topology:
        return {}
    groups = len(strategy.topology.clusters)
    bits = fedseq_bits(groups, num_weights, num_rounds, num_nodes // groups)
    return {"fedseq (HFLDD, eq. 19)": bits}
