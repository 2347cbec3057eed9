"""Pushes messages and pulls replies, by what the installed Flower offers."""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from logging import INFO

from flwr.app import Message
from flwr.common import log
from flwr.serverapp import Grid

from flwr_distill.server.grid.inbox import Inbox, Most, OneByOneInbox
from flwr_distill.server.line import module_of_line


class Exchange:
    """Sends messages and fetches replies over any Flower Grid, by its public methods alone."""

    def __init__(self, grid: Grid, inbox: type[Inbox] = Inbox) -> None:
        self._grid = grid
        self._inbox = inbox

    def prepare(self, messages: Sequence[Message]) -> None:
        """Add what nodes need to know about a phase to its messages."""

    def push(self, messages: Sequence[Message]) -> list[str]:
        """Push messages; return their ids, empty for those that the SuperLink refused."""
        return [name or "" for name in self._grid.push_messages(messages)]

    def open_inbox(self, messages: Mapping[str, Message], most: Callable[[Message], Most]) -> Inbox:
        """Open the inbox for the replies to pushed messages; see `Inbox`."""
        return self._inbox(self._grid, messages, most)


def exchange_over(grid: Grid) -> Exchange:
    """The exchange for a grid; for Flower's by its line, or else by its own, slower way."""
    if not any(_is_flowers(kind) for kind in type(grid).__mro__):  # a simulation's
        return Exchange(grid)
    if line := module_of_line("exchange"):
        own: Exchange | None = line.exchange_over(grid)
        return own or Exchange(grid)
    text = "Flower %s: messages and replies go Flower's own way, which is slower (docs/flower.md)"
    log(INFO, text, version("flwr"))
    return Exchange(grid, OneByOneInbox)


def _is_flowers(kind: type) -> bool:
    """Whether a class is one of Flower's grids; what serves these takes long to import."""
    return kind is not Grid and kind.__module__.partition(".")[0] == "flwr"
