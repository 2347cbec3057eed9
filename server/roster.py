"""Meets the nodes of a run: ids, names and order."""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from logging import INFO

from flwr.common import log
from flwr.serverapp import Grid

from strategies.common.directory import Description, Directory

POLL = 0.2


class TooFewNodesError(RuntimeError):
    """Fewer nodes connected in time than the run needs."""


@dataclass
class Roster:
    """The nodes of a run, in the order in which it met them.

    Parameters
    ----------
    directory : Directory
        Asks nodes who they are.
    names : dict[int, str]
        Name of each node id: its partition, or its id if it has none; prefixed with its data set if
        that differs from the run's, as in ``usps/1``. A node that returns with a new id is listed
        twice.
    num_examples : dict[int, int]
        Training samples of each node that reported them.
    together : dict[int, int]
        Partition of each virtual node that trains together with others.
    keys : dict[int, str]
        Fingerprint of the key of each node that signed its introduction.
    """

    directory: Directory = field(default_factory=Directory)
    names: dict[int, str] = field(default_factory=dict)
    num_examples: dict[int, int] = field(default_factory=dict)
    together: dict[int, int] = field(default_factory=dict)
    keys: dict[int, str] = field(default_factory=dict)

    @property
    def order(self) -> dict[int, int]:
        """Rank of each node id, the same in every run of the same federation."""
        return {node: rank for rank, node in enumerate(self.names)}

    def meet_new(self, grid: Grid, timeout: float, first: Iterable[str] = ()) -> list[int]:
        """Ask new nodes who they are, add them to the roster, and return their ids.

        The names in `first` come first, in that order; then nodes by partition; then others by id.
        """
        nodes = [node for node in grid.get_node_ids() if node not in self.names]
        descriptions = self.directory.look_up(grid, nodes, timeout)
        self.num_examples |= {node: about.num_examples for node, about in descriptions.items()}
        self.keys |= {node: about.key for node, about in descriptions.items() if about.key}
        self.together |= {
            node: about.partition
            for node, about in descriptions.items()
            if about.together and about.partition is not None
        }
        names = {node: _name(node, descriptions.get(node)) for node in nodes}
        ranks = {name: rank for rank, name in enumerate(first)}

        def sort_key(node: int) -> tuple[int, float, int]:
            about = descriptions.get(node)
            partition = math.inf if about is None or about.partition is None else about.partition
            return ranks.get(names[node], len(ranks)), partition, node

        nodes.sort(key=sort_key)
        self.names |= {node: names[node] for node in nodes}
        return nodes


def meet_nodes(
    grid: Grid, roster: Roster, min_nodes: int, timeout: float, first: Iterable[str] = ()
) -> None:
    """Wait for `min_nodes` nodes, and add all connected ones to the roster.

    Raises
    ------
    TooFewNodesError
        If fewer nodes connect within `timeout` seconds.
    """
    end = time.monotonic() + timeout
    while len(nodes := list(grid.get_node_ids())) < min_nodes:
        if time.monotonic() > end:
            raise TooFewNodesError(
                f"min-nodes = {min_nodes}, but {len(nodes)} nodes connected within "
                f"phase-timeout = {timeout:.0f} s (start more nodes, or lower min-nodes)"
            )
        time.sleep(POLL)
    roster.meet_new(grid, timeout, first)
    num_examples = sum(roster.num_examples.values())
    log(INFO, "%d nodes: %d training samples", len(roster.names), num_examples)


def _name(node: int, about: Description | None) -> str:
    if about is None:
        return str(node)
    domain = f"{about.dataset}/" if about.dataset else ""
    return f"{domain}{node if about.partition is None else about.partition}"
