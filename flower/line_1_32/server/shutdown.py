"""The end of a ServerApp's process."""

import signal
from collections.abc import Callable

from flwr.supercore.exit import add_exit_handler

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def ignore_signals_at_the_end() -> None:
    """Have this process ignore SIGINT and SIGTERM once Flower ends it.

    Flower ends a process under a lock that is not reentrant, in the handler of a signal. A second
    signal, such as SIGTERM after the SIGINT that ends a stopped run, would wait for the lock for
    ever, in the thread that has it.
    """
    at_the_end(lambda: None)


def at_the_end(act: Callable[[], None]) -> None:
    """Have this process call `act` first when Flower ends it, after its app or before."""

    def ignore_and_act() -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        act()

    add_exit_handler(ignore_and_act)  # the last one added is called first
