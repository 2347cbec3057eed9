"""Nodes that can take part in a phase, and how long a strategy may wait for more."""

import math
import time
from collections.abc import Collection, Iterable, Mapping

from flwr.serverapp import Grid

from flwr_distill.strategies.common.waiting import TooFewNodesError

PAUSE_SHARE = 0.1
"""Share of a phase's deadline; a strategy that pauses longer between polls is not waiting."""
MIN_PAUSE = 5.0
"""Least such pause, in seconds; Flower's strategies poll every second."""
WAIT_MARGIN = 2.0
"""Seconds beyond the deadline, in which waits with their own error raise that one."""
SAME_LIST = 0.5
"""Seconds for which a list of connected nodes is reused within a phase."""


class Nodes:
    """Lists the nodes that can take part, in a fixed order; `deadline` is in seconds."""

    def __init__(self, grid: Grid, deadline: float) -> None:
        self.order: Mapping[int, int] = {}
        """Rank of each known node id; unknown nodes come after these, by id."""
        self.excluded: Collection[int] = ()
        """Connected nodes that cannot take part."""
        self.wanted = "the number of nodes that it needs"
        """What makes the strategy wait for nodes, for errors: its settings, with their values."""
        self._grid = grid
        self._deadline = deadline
        self._connected: list[int] = []
        self._listed = -math.inf
        self._alone_since = math.inf
        self._waiting_since = math.inf
        self._polled = -math.inf

    def ids(self) -> list[int]:
        """Ids of connected nodes that can take part, by rank.

        Raises TooFewNodesError if for the deadline's time no node was connected, or the strategy
        has only polled for more nodes, without a message or a pause.
        """
        # Flower counts the nodes, then samples that many from a second list, and waits without
        # end if that one is shorter: both must be the same list.
        now = time.monotonic()
        paused = now > self._polled + max(MIN_PAUSE, PAUSE_SHARE * self._deadline)
        self._waiting_since = now if paused else min(self._waiting_since, now)
        self._polled = now
        if not self._connected or now > self._listed + SAME_LIST:
            self._connected, self._listed = list(self._grid.get_node_ids()), now
        self._alone_since = math.inf if self._connected else min(self._alone_since, now)
        if now > self._alone_since + self._deadline:
            raise TooFewNodesError(
                f"no node has been connected for phase-timeout = {self._deadline:.0f} s "
                "(start nodes, or raise phase-timeout)"
            )
        able = [node for node in self._connected if node not in self.excluded]
        if now > self._waiting_since + self._deadline + WAIT_MARGIN:
            self._waiting_since = math.inf
            raise TooFewNodesError(
                f"the strategy waited phase-timeout = {self._deadline:.0f} s for more nodes than "
                f"the {len(able)} that can take part (start more, or lower {self.wanted})"
            )
        return self.in_order(able)

    def in_order(self, nodes: Iterable[int]) -> list[int]:
        """Sort node ids by rank."""
        return sorted(nodes, key=self.rank)

    def rank(self, node: int) -> tuple[int, int]:
        """Sort key of a node id."""
        return self.order.get(node, len(self.order)), node

    def stop_waiting(self) -> None:
        """Note that the strategy sends messages, and so waits for no more nodes."""
        self._waiting_since = math.inf

    def refresh(self) -> None:
        """Have the next call list the connected nodes again."""
        self._connected = []
