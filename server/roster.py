"""Meeting the nodes before a run: who is there, under which name, in which order."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from logging import INFO, WARNING

from flwr.app import Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from task.messages import DESCRIBE, METRICS, NUM_EXAMPLES

POLL = 0.2


class TooFewNodesError(RuntimeError):
    """Fewer nodes connected in time than the run needs."""


@dataclass(frozen=True)
class Roster:
    """The nodes that a run began with.

    Parameters
    ----------
    names : Mapping[int, str]
        Name of each node id: its partition, or its id where it has none.
    num_examples : Mapping[int, int]
        Training samples of each node that said so.
    """

    names: Mapping[int, str]
    num_examples: Mapping[int, int]

    @property
    def order(self) -> dict[int, int]:
        """Rank of each node id, the same in every run of the same federation."""
        return {node: rank for rank, node in enumerate(self.names)}


def meet_nodes(grid: Grid, min_nodes: int, timeout: float) -> Roster:
    """Wait for enough nodes and ask each who it is.

    Parameters
    ----------
    grid : Grid
        Any Flower grid.
    min_nodes : int
        Nodes to wait for.
    timeout : float
        Seconds to wait for them, and then for their answers.

    Raises
    ------
    TooFewNodesError
        If fewer nodes connect in time.
    """
    end = time.monotonic() + timeout
    while len(nodes := list(grid.get_node_ids())) < min_nodes:
        if time.monotonic() > end:
            raise TooFewNodesError(
                f"min-nodes = {min_nodes}, but {len(nodes)} nodes connected within "
                f"phase-timeout = {timeout:.0f} s (start more nodes, or lower min-nodes)"
            )
        time.sleep(POLL)
    described = {}
    messages = [Message(RecordDict(), node, DESCRIBE) for node in nodes]
    for reply in grid.send_and_receive(messages, timeout=timeout):
        node = reply.metadata.src_node_id
        if reply.has_error():
            log(WARNING, "Node %d does not describe itself: %s", node, reply.error.reason)
        else:
            described[node] = reply.content.metric_records[METRICS]
    roster = _roster(nodes, described)
    log(INFO, "%d nodes: %d training samples", len(nodes), sum(roster.num_examples.values()))
    return roster


def _roster(nodes: list[int], described: Mapping[int, MetricRecord]) -> Roster:
    """Nodes with a partition first, by partition; then the others, by id."""
    partition = {
        node: int(metrics["partition-id"])
        for node, metrics in described.items()
        if "partition-id" in metrics
    }
    ordered = sorted(nodes, key=lambda node: (partition.get(node, len(nodes)), node))
    return Roster(
        names={node: str(partition.get(node, node)) for node in ordered},
        num_examples={node: int(metrics[NUM_EXAMPLES]) for node, metrics in described.items()},
    )
