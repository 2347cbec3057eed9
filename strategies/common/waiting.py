"""Waits for nodes to connect."""

import time
from collections.abc import Callable
from logging import INFO

from flwr.common import log
from flwr.serverapp import Grid

from flwr_distill.base.text import counted
from flwr_distill.task.errors import ReportedError

POLL = 0.2
"""Seconds; there is one server, so polls need no jitter."""
LOG_EVERY = 10.0


class TooFewNodesError(ReportedError, RuntimeError):
    """Fewer nodes than the run needs connected in time, or are able to take part."""


def connected_nodes(
    grid: Grid,
    least: int,
    timeout: float,
    on_wait: Callable[[int], None] = lambda _: None,
) -> list[int]:
    """Wait until `least` nodes, at least 1, are connected; return the ids of all that are.

    Meanwhile `on_wait` is called again and again with the number that is missing.

    Raises
    ------
    TooFewNodesError
        If fewer are connected after `timeout` seconds.
    """
    start, logged = time.monotonic(), (-1, 0.0)
    while len(nodes := list(grid.get_node_ids())) < least:
        seconds = time.monotonic() - start
        if seconds > timeout:
            raise TooFewNodesError(
                f"{counted(len(nodes), 'node')} connected within phase-timeout = {timeout:.0f} s",
                where="min-nodes",
                value=least,
                remedy="start more nodes, or lower min-nodes, in a strategy min_available_nodes",
            )
        if len(nodes) != logged[0] or seconds > logged[1] + LOG_EVERY:
            text = "Waiting for nodes: %d of %d are connected, %.0f s left"
            log(INFO, text, len(nodes), least, timeout - seconds)
            logged = len(nodes), seconds
        on_wait(least - len(nodes))
        time.sleep(POLL)
    return nodes
