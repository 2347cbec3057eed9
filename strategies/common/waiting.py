"""Waits for nodes to connect."""

import time
from logging import INFO

from flwr.common import log
from flwr.serverapp import Grid

from flwr_distill.base.text import counted

POLL = 0.2
"""Seconds; there is one server, so polls need no jitter."""
SAY_EVERY = 10.0


class TooFewNodesError(RuntimeError):
    """Fewer nodes than the run needs connected in time, or are able to take part."""


def connected_nodes(grid: Grid, least: int, timeout: float) -> list[int]:
    """Wait until so many nodes are connected; return the ids of all that are.

    Parameters
    ----------
    least : int
        From 1.
    timeout : float
        Seconds.

    Raises
    ------
    TooFewNodesError
        If fewer are connected by then.
    """
    start, said = time.monotonic(), (-1, 0.0)
    while len(nodes := list(grid.get_node_ids())) < least:
        seconds = time.monotonic() - start
        if seconds > timeout:
            raise TooFewNodesError(
                f"min-nodes = {least}, but {counted(len(nodes), 'node')} connected within "
                f"phase-timeout = {timeout:.0f} s (start more nodes, or lower min-nodes, which is "
                "min_available_nodes of a strategy)"
            )
        if len(nodes) != said[0] or seconds > said[1] + SAY_EVERY:
            text = "Waiting for nodes: %d of %d are connected, %.0f s left"
            log(INFO, text, len(nodes), least, timeout - seconds)
            said = len(nodes), seconds
        time.sleep(POLL)
    return nodes
