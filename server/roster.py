"""Meeting the nodes of a run: who is there, under which name, in which order."""

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
        Asks each who it is.
    names : dict[int, str]
        Name of each node id: its partition, or its id where it has none; after the data set where
        the node holds another than the run's, as in ``usps/1``. A node that comes back under
        another id is there twice.
    num_examples : dict[int, int]
        Training samples of each node that said so.
    """

    directory: Directory = field(default_factory=Directory)
    names: dict[int, str] = field(default_factory=dict)
    num_examples: dict[int, int] = field(default_factory=dict)

    @property
    def order(self) -> dict[int, int]:
        """Rank of each node id, the same in every run of the same federation."""
        return {node: rank for rank, node in enumerate(self.names)}

    def meet_new(self, grid: Grid, timeout: float, first: Iterable[str] = ()) -> list[int]:
        """Ask nodes that are not on the roster who they are, and put them there.

        Nodes with a partition come first, by partition; then the others, by id.

        Parameters
        ----------
        grid : Grid
            Any Flower grid.
        timeout : float
            Seconds to wait for their answers.
        first : Iterable[str], optional (default: ())
            Names that come before all others, in this order.

        Returns
        -------
        list[int]
            The new nodes.
        """
        nodes = [node for node in grid.get_node_ids() if node not in self.names]
        found = self.directory.look_up(grid, nodes, timeout)
        self.num_examples |= {node: known.num_examples for node, known in found.items()}
        name = {node: _name(node, found.get(node)) for node in nodes}
        rank = {name: place for place, name in enumerate(first)}

        def place(node: int) -> tuple[int, float, int]:
            known = found.get(node)
            partition = math.inf if known is None or known.partition is None else known.partition
            return rank.get(name[node], len(rank)), partition, node

        nodes.sort(key=place)
        self.names |= {node: name[node] for node in nodes}
        return nodes


def meet_nodes(
    grid: Grid, roster: Roster, min_nodes: int, timeout: float, first: Iterable[str] = ()
) -> None:
    """Wait for enough nodes, ask each who it is, and put all on the roster.

    Parameters
    ----------
    grid : Grid
        Any Flower grid.
    roster : Roster
        Empty.
    min_nodes : int
        Nodes to wait for.
    timeout : float
        Seconds to wait for them, and then for their answers.
    first : Iterable[str], optional (default: ())
        Names of the nodes that come first, in this order.

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
    roster.meet_new(grid, timeout, first)
    num_examples = sum(roster.num_examples.values())
    log(INFO, "%d nodes: %d training samples", len(roster.names), num_examples)


def _name(node: int, known: Description | None) -> str:
    if known is None:
        return str(node)
    domain = f"{known.dataset}/" if known.dataset else ""
    return f"{domain}{node if known.partition is None else known.partition}"
