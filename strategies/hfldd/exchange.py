"""Virtual data on their way from members to heads, as the server sees it (HFLDD, step 4)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from flwr_distill.base.text import counted
from flwr_distill.links.records import VIRTUAL_DATA, LinkMode
from flwr_distill.links.routes import Links
from flwr_distill.protocol.messages import ARRAYS, CONFIG, METRICS, PARCEL, ROUTE
from flwr_distill.protocol.replies import number, usable
from flwr_distill.strategies.common.directory import Directory
from flwr_distill.strategies.common.retries import Retries
from flwr_distill.strategies.hfldd.clusters import Clusters, LiveCluster
from flwr_distill.strategies.hfldd.limits import Limits
from flwr_distill.strategies.hfldd.method import (
    DISTILL,
    KEPT_PARCELS,
    RECEIVE,
    REFINEMENT,
    HFLDDSettings,
)
from flwr_distill.strategies.hfldd.requests import Refinement
from flwr_distill.task.errors import SettingsError


@dataclass
class Exchange:
    """Has members send virtual data, and heads receive them.

    Attributes
    ----------
    retries, retries_of_heads : Retries, dict[int, Retries]
        When members are asked again that sent nothing, and those whose data a head did not keep.
    distilled_values : int
        Values of the virtual data sent to heads so far.
    models_to_members : int
        Models sent to members so far, to refine virtual data with.
    """

    clusters: Clusters
    directory: Directory
    settings: HFLDDSettings
    mode: LinkMode
    timeout: float
    image_shape: tuple[int, ...] | None
    retries: Retries = field(default_factory=Retries)
    retries_of_heads: dict[int, Retries] = field(default_factory=dict)
    distilled_values: int = 0
    models_to_members: int = 0

    @property
    def limits(self) -> Limits:
        """Bounds of what members send."""
        num_classes = self.clusters.label_shape[-1]
        return Limits(self.directory, self.settings.distillation, num_classes, self.image_shape)

    def links(self, grid: Grid, nodes: Iterable[int]) -> Links:
        """Links between the nodes that introduced themselves."""
        known = self.directory.look_up(grid, nodes, self.timeout)
        introductions = {n: d.introduction for n, d in known.items() if d.introduction}
        return Links(introductions, self.mode)

    def complete(
        self, server_round: int, arrays: ArrayRecord, grid: Grid, *, forming: bool
    ) -> None:
        """Have members send to heads without their data, or all of them refined data."""
        connected = set(grid.get_node_ids())
        every = self.settings.refresh_every
        refining = every > 0 and (server_round - 1) % every == 0 and not forming
        waiting = self.clusters.members if refining else self.clusters.missing
        senders = {
            node: cluster
            for node, cluster in waiting(connected).items()
            if self.retries.due(node, server_round)
            and self._of_head(cluster.head).due(node, server_round)
        }
        if not senders:
            return
        links = self.links(grid, [*senders, *{cluster.head for cluster in senders.values()}])
        routes = self._routes(senders, links, forming=forming)
        request = RecordDict({CONFIG: _record(self.settings.distillation)})
        if refining:
            how = Refinement(server_round=server_round, steps=self.settings.refresh_steps)
            request.update({REFINEMENT: _record(how), ARRAYS: arrays})
            self.models_to_members += len(routes)
        deliveries = self._collect(request, routes, links, grid)
        self._hand_over(deliveries, server_round, grid)
        if refining:
            self.clusters.forget_other_heads()
        for node, cluster in senders.items():
            if node not in cluster.held_by_head:
                # What a head does not keep is between the two: either may lie, and others wait for
                # neither.
                failed = self._of_head(cluster.head) if node in deliveries else self.retries
                failed.failed(node, server_round)
                self.directory.forget(node)
                self.directory.forget(cluster.head)

    def lost(self, head: int, members: Iterable[int], server_round: int) -> None:
        """Note that a head no longer has members' data, which are sent again ever more rarely."""
        for node in members:
            self._of_head(head).failed(node, server_round)

    def _of_head(self, head: int) -> Retries:
        return self.retries_of_heads.setdefault(head, Retries())

    def _routes(
        self, senders: Mapping[int, LiveCluster], links: Links, *, forming: bool
    ) -> dict[int, ConfigRecord]:
        """Routes to heads by member; impossible ones are errors only while clusters are formed."""
        routes = {}
        for node, cluster in senders.items():
            if node not in links or cluster.head not in links:
                continue
            try:
                largest = self.limits.num_bytes(node)
                routes[node] = links.route(node, cluster.head, VIRTUAL_DATA, largest)
            except SettingsError as error:
                if forming:  # the user can still change the setting
                    raise
                log(WARNING, "Node %d cannot send to head %d: %s", node, cluster.head, error)
        return routes

    def _collect(
        self,
        request: RecordDict,
        routes: Mapping[int, ConfigRecord],
        links: Links,
        grid: Grid,
    ) -> dict[int, ConfigRecord]:
        """Members' virtual data, as deliveries for their heads."""
        verb = "refine" if REFINEMENT in request else "distil"
        verb = f"{verb}s its" if len(routes) == 1 else f"{verb} their"
        log(INFO, "HFLDD: %s %s data", counted(len(routes), "member"), verb)
        messages = [
            Message(RecordDict({**request, ROUTE: route}), member, DISTILL)
            for member, route in routes.items()
        ]
        deliveries = {}
        for reply in usable(grid.send_and_receive(messages, timeout=self.timeout)):
            member = reply.metadata.src_node_id
            try:
                parcel, values = reply.content.config_records[PARCEL], number(reply, "num-values")
                deliveries[member] = links.forward(routes[member], parcel)
            except (KeyError, ValueError) as error:
                log(WARNING, "Node %d sent no parcel: %s", member, error)
                continue
            self.distilled_values += int(min(values, self.limits.num_values(member)))
        return deliveries

    def _hand_over(
        self, deliveries: Mapping[int, ConfigRecord], server_round: int, grid: Grid
    ) -> None:
        """Deliver members' virtual data to their heads, and note what these keep."""
        messages, sent = [], {}
        for cluster in self.clusters:
            members = {r: node for r, node in enumerate(cluster.nodes) if node in deliveries}
            if members:
                sent[cluster.head] = cluster, members
                bounds = self.limits.parcels(members.values(), server_round)
                parcels = {f"{PARCEL}.{rank}": deliveries[n] for rank, n in members.items()}
                content = RecordDict({CONFIG: _record(bounds), **parcels})
                messages.append(Message(content, cluster.head, RECEIVE))
        for reply in usable(grid.send_and_receive(messages, timeout=self.timeout)):
            cluster, members = sent[reply.metadata.src_node_id]
            kept = reply.content.metric_records.get(METRICS, MetricRecord()).get(KEPT_PARCELS)
            nodes = [n for r, n in members.items() if isinstance(kept, list) and r in kept]
            text = "HFLDD: head %d has virtual data of %s"
            log(INFO, text, cluster.head, counted(len(nodes), "member"))
            cluster.received(nodes)

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {
            "distilled-values": self.distilled_values,
            "models-to-members": self.models_to_members,
            "retries": self.retries.state_dict(),
            "retries-of-heads": {
                head: retries.state_dict() for head, retries in self.retries_of_heads.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        self.distilled_values = state["distilled-values"]
        self.models_to_members = state["models-to-members"]
        self.retries = Retries(state["retries"])
        of_heads = state["retries-of-heads"].items()
        self.retries_of_heads = {head: Retries(retries) for head, retries in of_heads}


def _record(block: Any) -> ConfigRecord:
    return ConfigRecord(block.model_dump(by_alias=True))
