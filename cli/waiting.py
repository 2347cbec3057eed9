"""Says in a terminal what a command waits for, and for how long it has."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.text import Text


class Waiting:
    """A line with a spinner below the output, in a terminal only: ``starting ... 12 s``.

    The seconds count from the last change of `what`.
    """

    def __init__(self, console: Console, what: str) -> None:
        self._what, self._since = what, time.monotonic()
        self._status = console.status("")
        self._status.update(self)  # a renderable: it is drawn anew each time

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._status.stop()

    def __rich__(self) -> Text:
        seconds = time.monotonic() - self._since
        return Text(f"{self._what} {seconds:.0f} s" if seconds >= 1 else self._what)

    @property
    def what(self) -> str:
        """What is waited for."""
        return self._what

    @what.setter
    def what(self, what: str) -> None:
        if what != self._what:
            self._what, self._since = what, time.monotonic()
