"""Waits for nodes to connect."""

import time
from logging import INFO

from flwr.common import log
from flwr.serverapp import Grid

from task.words import counted

LOOK_EVERY = 1.0
"""Seconds between looks; there is one server, so they need no jitter."""


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
    RuntimeError
        If fewer are connected by then.
    """
    end, said = time.monotonic() + timeout, -1
    while len(nodes := list(grid.get_node_ids())) < least:
        if time.monotonic() > end:
            raise RuntimeError(
                f"{counted(len(nodes), 'node')} of {least} connected within {timeout:.0f} s (start "
                "more nodes, or lower min_available_nodes, which is min-nodes in the run config)"
            )
        if len(nodes) != said:
            log(INFO, "Waiting for nodes: %d of %d are connected", len(nodes), least)
            said = len(nodes)
        time.sleep(LOOK_EVERY)
    return nodes
