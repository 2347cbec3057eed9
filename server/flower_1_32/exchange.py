"""Messages and replies through a SuperLink, in fewer and shorter waits than Flower's own."""

from collections.abc import Callable, Mapping, Sequence

from flwr.app import Message
from flwr.serverapp import Grid
from flwr.supercore.retry import exponential
from flwr.superlink.grid import GrpcGrid

from protocol.superlink import limit_absence, limit_calls, overloaded, retry_also
from server.flower_1_32.batches import push
from server.flower_1_32.calls import Calls
from server.flower_1_32.inbox import SuperLinkInbox
from server.flower_1_32.looks import space_looks
from server.grid.exchange import Exchange
from server.grid.inbox import Inbox, Most

LONGEST_CALL = 600.0
"""Seconds in which the SuperLink must answer a call. A parcel of a GB needs 14 Mbit/s."""
LONGEST_AWAY = 3600.0
"""Seconds for which a run waits for a SuperLink that is away; then it ends."""
LONGEST_RETRY = 2
"""Seconds until the next attempt, at most, while the SuperLink is away (Flower: up to 20)."""


class SuperLinkExchange(Exchange):
    """Waits for a SuperLink with too much to do, and notices soon that it is back.

    A phase cannot end before.
    """

    _grid: GrpcGrid

    def __init__(self, grid: GrpcGrid) -> None:
        super().__init__(grid)
        retry_also(grid._retry_invoker, overloaded)
        limit_calls(grid._retry_invoker, LONGEST_CALL)
        limit_absence(grid._retry_invoker, LONGEST_AWAY)
        grid._retry_invoker.wait_gen_factory = lambda: exponential(max_delay=LONGEST_RETRY)
        self._calls = Calls(grid)

    def prepare(self, messages: Sequence[Message]) -> None:
        """Space the looks of nodes, if they are many."""
        space_looks(messages)

    def push(self, messages: Sequence[Message]) -> list[str]:
        """Push messages in batches; return their ids."""
        return push(self._calls, messages)

    def open_inbox(self, messages: Mapping[str, Message], most: Callable[[Message], Most]) -> Inbox:
        """Open an inbox that fetches replies piece by piece."""
        return SuperLinkInbox(self._calls, messages, most)


def exchange_over(grid: Grid) -> Exchange | None:
    """Open the exchange for a SuperLink's grid; None for a simulation's."""
    return SuperLinkExchange(grid) if isinstance(grid, GrpcGrid) else None
