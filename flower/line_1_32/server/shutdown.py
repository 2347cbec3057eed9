"""The end of a ServerApp's process."""

import signal
from collections.abc import Callable

from flwr.supercore.exit import add_exit_handler

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def ignore_signals_at_the_end() -> None:
    """Have this process ignore SIGINT and SIGTERM once Flower ends it.

    Flower ends a process under a lock that is not reentrant, in the handler of whatever signal
    comes: a second one, such as SIGTERM after the SIGINT by which a stopped run ends, would wait
    for the lock for ever, in the thread that holds it.
    """
    at_the_end(lambda: None)


def at_the_end(act: Callable[[], None]) -> None:
    """Have this process call `act` first once Flower ends it, after its app or in the middle."""

    def ignore_and_act() -> None:
        _ignore_signals()
        act()

    add_exit_handler(ignore_and_act)  # the last one added is the first to be called


def _ignore_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
