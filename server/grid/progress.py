"""Says in the log how far a long phase is."""

import time
from logging import INFO

from flwr.common import log

EVERY = 4.0
"""Seconds between lines; a tenth of what the phase has taken, where that is more."""


class Progress:
    """The progress of a phase, named `title`, in which `total` nodes are asked."""

    def __init__(self, title: str, total: int) -> None:
        self._title = title
        self._nodes = f"{total} node{'' if total == 1 else 's'}"
        self._total = total
        self._start = self._said = time.monotonic()

    def show(self, replied: int) -> None:
        """Log how many nodes have replied, and the time left at their pace, if it is time to."""
        now = time.monotonic()
        seconds = now - self._start
        if now - self._said < max(EVERY, seconds / 10):
            return
        self._said = now
        left = round(seconds / replied * (self._total - replied)) if replied else None
        when = f"{seconds:.0f} s so far" if left is None else f"about {left} s left"
        log(INFO, "%s: %d of %s, %s", self._title, replied, self._nodes, when)
