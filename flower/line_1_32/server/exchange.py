"""Messages and replies through a SuperLink, in fewer and shorter waits than Flower's own.

Nodes poll often once they have replied. A SuperLink answers a few hundred polls a second in all,
and those of a hundred nodes would delay the replies for which the phase still waits.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.supercore.exit import add_exit_handler
from flwr.supercore.retry import RetryInvoker, exponential
from flwr.superlink.grid import GrpcGrid

from flwr_distill.flower.line_1_32.calls import (
    Outage,
    limit_absence,
    limit_calls,
    overloaded,
    retry_also,
)
from flwr_distill.flower.line_1_32.server.batches import Calls, push
from flwr_distill.flower.line_1_32.server.inbox import LARGE, NodeKeys, SuperLinkInbox
from flwr_distill.node.kernel import trim_heap
from flwr_distill.protocol.messages import PACE, POLL_EVERY
from flwr_distill.server.grid.exchange import Exchange
from flwr_distill.server.grid.inbox import Inbox, Most
from flwr_distill.server.grid.ledger import content_bytes

POLLS = 100
"""Polls a second of all nodes of a phase: a small part of what a SuperLink answers."""
FEW = 5
"""Nodes whose polls need no spacing."""


def space_polls(messages: Sequence[Message]) -> None:
    """Write into a phase's messages how long nodes wait between polls, if they are many."""
    if len(messages) <= FEW:
        return
    record = ConfigRecord({POLL_EVERY: len(messages) / POLLS})
    for message in messages:
        message.content[PACE] = record


CALL_TIMEOUT = 600.0
"""Seconds in which the SuperLink must answer a call. A parcel of a GB needs 14 Mbit/s."""
MAX_AWAY = 3600.0
"""Seconds for which a run waits for a SuperLink that is away; then it ends."""
AWAY = (
    f"this run waits up to {MAX_AWAY / 60:.0f} minutes for it (start it again, with the same "
    "--database)"
)
MAX_RETRY = 2
"""Seconds until the next attempt, at most, while the SuperLink is away (Flower: up to 20)."""


class SuperLinkExchange(Exchange):
    """Waits for an overloaded SuperLink, and notices soon that it is back."""

    _grid: GrpcGrid

    def __init__(self, grid: GrpcGrid) -> None:
        super().__init__(grid)
        retry_also(grid._retry_invoker, overloaded)
        limit_calls(grid._retry_invoker, CALL_TIMEOUT)
        limit_absence(grid._retry_invoker, MAX_AWAY)
        Outage("The SuperLink", AWAY).watch(grid._retry_invoker)
        wait_apart(grid._retry_invoker)
        self._calls = Calls(grid)
        self._keys = NodeKeys.from_environment()

    def prepare(self, messages: Sequence[Message]) -> None:
        """Space the polls of nodes, if they are many."""
        space_polls(messages)

    def push(self, messages: Sequence[Message]) -> list[str]:
        """Push messages in batches; return their ids."""
        ids = push(self._calls, messages)
        if messages and content_bytes(messages[0].content) > LARGE:
            trim_heap()
        return ids

    def open_inbox(self, messages: Mapping[str, Message], most: Callable[[Message], Most]) -> Inbox:
        """Open an inbox that fetches replies piece by piece."""
        return SuperLinkInbox(self._calls, messages, most, self._keys)


def wait_apart(invoker: RetryInvoker) -> None:
    """Let each call wait by itself, and stop waiting once the process ends.

    Flower's calls wait under a lock. A signal that ends the process while the main thread has it
    causes a deadlock: Flower's handler waits there for the thread of heartbeats, and that one for
    the lock.
    """

    def wait(seconds: float) -> None:
        time.sleep(max(seconds, 0))  # below 0 if the process just began to end

    def stop_waiting() -> None:
        invoker.max_time = 0.0

    invoker.wait_gen_factory = lambda: exponential(max_delay=MAX_RETRY)
    invoker.wait_function = wait
    add_exit_handler(stop_waiting)


def exchange_over(grid: Grid) -> Exchange | None:
    """Open the exchange for a SuperLink's grid; None for a simulation's."""
    return SuperLinkExchange(grid) if isinstance(grid, GrpcGrid) else None
