"""Messages of FedHEAD's server to leaders and members in a round, and parcels between these."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from logging import WARNING

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from flwr_distill.links.routes import Links
from flwr_distill.protocol.arrays import Arrays, model_arrays, sent_arrays
from flwr_distill.protocol.meeting import one_line
from flwr_distill.protocol.messages import (
    ARRAYS,
    CONFIG,
    DELIVERY,
    LINK_ERROR,
    PARCEL,
    ROUTE,
    ranked,
)
from flwr_distill.protocol.outliers import update_norm
from flwr_distill.protocol.parcels import coding_record, from_payload, to_payload
from flwr_distill.protocol.replies import set_aside, usable
from flwr_distill.strategies.common.topology import Cluster
from flwr_distill.strategies.fedhead.membership import Membership
from flwr_distill.strategies.fedhead.method import GLOBAL_MODEL, HAND_IN, HAND_OUT, SECTOR_MODEL
from flwr_distill.task.errors import SettingsError

HEADER = 1024
"""Bytes that an array's name, type and shape may take in a parcel."""


@dataclass
class Exchange:
    """Messages and parcels of a round.

    Parameters
    ----------
    start : Mapping[str, ndarray]
        The global model at the start of the round.
    timeout : float
        Seconds to wait for replies.
    strict : bool
        Whether an impossible route is an error, as in the first round, when the user can still
        change the setting.
    codec_of_changes, codec_of_model : str
        How members send what they trained, and leaders hand out the model (`protocol.parcels`).

    Attributes
    ----------
    routes : dict[int, ConfigRecord]
        Each member's route to its leader.
    codings : dict[int, dict[str, ConfigRecord]]
        The record by which each node of a sector codes what it trained; none where it is plain.
    """

    grid: Grid
    membership: Membership
    links: Links
    start: Arrays
    timeout: float
    strict: bool
    codec_of_changes: str = "float32"
    codec_of_model: str = "float32"
    routes: dict[int, ConfigRecord] = field(default_factory=dict)
    codings: dict[int, dict[str, ConfigRecord]] = field(default_factory=dict)

    @cached_property
    def start_on_nodes(self) -> Arrays:
        """The global model as nodes have it once they trained, which may be coded on its way."""
        on_nodes: Callable[[Arrays], Arrays] | None = getattr(self.grid, "on_nodes", None)
        return on_nodes(self.start) if on_nodes else self.start

    @cached_property
    def rounding(self) -> float:
        """How far from that the model may be that leaders hand out."""
        if self.codec_of_model == "float32":
            return 0.0
        model = self.start_on_nodes
        return update_norm(from_payload(to_payload(model, self.codec_of_model), sys.maxsize), model)

    def ask(self, messages: Sequence[Message]) -> dict[int, Message]:
        """Replies by node, in the order of ``messages``; nodes without one count as failed."""
        replies = usable(self.grid.send_and_receive(messages, timeout=self.timeout))
        by_node = {reply.metadata.src_node_id: reply for reply in replies}
        nodes = [message.metadata.dst_node_id for message in messages]
        self.membership.fail(*(node for node in nodes if node not in by_node))
        return {node: by_node[node] for node in nodes if node in by_node}

    def model_of(self, reply: Message) -> Arrays:
        """The model in a reply, checked; ValueError if it is unusable."""
        return model_arrays(sent_arrays(reply), self.start)

    def routes_to(self, leader: int, members: Iterable[int]) -> dict[int, ConfigRecord]:
        """Note and return the possible routes of members to their leader."""
        ends = [(member, leader) for member in members]
        routes = {n: route for (n, _), route in self.possible(ends, SECTOR_MODEL).items()}
        self.routes |= routes
        return routes

    def settle_coding(self, nodes: Sequence[int]) -> None:
        """Note how these nodes code what they train: a later leader gets it so, too."""
        coding = coding_record(self.codec_of_changes, self.membership.codecs(nodes))
        self.codings |= dict.fromkeys(nodes, coding)

    def possible(
        self, ends: Iterable[tuple[int, int]], purpose: str
    ) -> dict[tuple[int, int], ConfigRecord]:
        """Routes by (sender, receiver), without impossible ones, which are logged.

        Raises SettingsError if one is impossible and the exchange is `strict`.
        """
        routes = {}
        largest = sum(array.nbytes + HEADER for array in self.start.values())
        for sender, receiver in ends:
            try:
                routes[sender, receiver] = self.links.route(sender, receiver, purpose, largest)
            except SettingsError as error:
                if self.strict:
                    raise
                log(WARNING, "Node %d cannot send to node %d: %s", sender, receiver, error)
        return routes

    def hand_out(
        self, clusters: Iterable[Cluster], arrays: ArrayRecord
    ) -> dict[int, dict[str, ConfigRecord]]:
        """Step 5 of the previous round, over direct links: leaders hand w to their members.

        Returns the records that replace w in the train messages of nodes that need no w from the
        server: a member's delivery from its leader, none for a leader.
        """
        messages, receivers = [], {}
        for cluster in clusters:
            pairs = [(cluster.head, member) for member in cluster.members]
            possible = self.possible(pairs, GLOBAL_MODEL)
            direct = {
                rank: (member, ConfigRecord({**route, "link": "direct"}))
                for rank, member in enumerate(cluster.members)
                if (route := possible.get((cluster.head, member))) and _is_direct(route)
            }
            if direct:
                receivers[cluster.head] = direct
                by_rank = {f"{ROUTE}.{rank}": route for rank, (_, route) in direct.items()}
                ends = (cluster.head, *(member for member, _ in direct.values()))
                coding = coding_record(self.codec_of_model, self.membership.codecs(ends))
                content = RecordDict({ARRAYS: arrays, **by_rank, **coding})
                messages.append(Message(content, cluster.head, HAND_OUT))
        downloads: dict[int, dict[str, ConfigRecord]] = {}
        for leader, reply in self.ask(messages).items():
            downloads[leader] = {}
            for rank, parcel in ranked(reply.content.config_records, PARCEL).items():
                if rank not in receivers[leader]:
                    continue
                member, route = receivers[leader][rank]
                try:
                    downloads[member] = {DELIVERY: self.links.forward(route, parcel)}
                except ValueError as error:
                    log(WARNING, "Node %d handed out a bad parcel: %s", leader, error)
        return downloads

    def deliveries(self, replies: Iterable[Message]) -> dict[int, ConfigRecord]:
        """Members' models, as deliveries for their leaders."""
        deliveries: dict[int, ConfigRecord] = {}
        for reply in replies:
            if (node := reply.metadata.src_node_id) not in self.routes:
                continue
            if (parcel := reply.content.config_records.get(PARCEL)) is None:
                report = reply.content.config_records.get(CONFIG, ConfigRecord())
                reason = one_line(report.get(LINK_ERROR))
                log(WARNING, "Node %d sent its leader nothing: %s", node, reason)
                continue
            try:
                deliveries[node] = self.links.forward(self.routes[node], parcel)
            except ValueError as error:
                set_aside(self.grid, node, reply.metadata.message_type, one_line(error))
        return deliveries

    def collect_again(self, members: Mapping[int, Iterable[int]]) -> dict[int, ConfigRecord]:
        """Have members, given by leader, send their models to other leaders of their sectors."""
        messages = [
            Message(RecordDict({ROUTE: route, **self.codings[node]}), node, HAND_IN)
            for leader, nodes in members.items()
            for node, route in self.routes_to(leader, nodes).items()
        ]
        return self.deliveries(self.ask(messages).values())


def _is_direct(route: ConfigRecord) -> bool:
    return bool(route["address"]) and route["link"] != "relay"
