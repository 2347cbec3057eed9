"""How long a node waits until it polls for work again: a share of the time that it has been idle.

It polls often during a run and seldom in between, and a message waits little longer than its
sender.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

SHARE = 0.05
"""Of the time idle, up to `KEEN` seconds."""
KEEN = 3.0
LONG_SHARE = 0.02
"""Of the time idle, for a node to which nothing has come for over two and a half minutes."""
MAX_WAIT = 50.0
"""Seconds for which a poll waits at a SuperLink that lets it; proxies end calls after a minute."""
JITTER = 0.25
"""Share of the pause that is drawn, so that nodes do not stay in step."""


def pause(idle_for: float, *, busy: float, idle: float, spacing: float = 0.0) -> float:
    """Longest pause of a node that has been idle for so many seconds, between `busy` and `idle`.

    `spacing` is the server's wish; it counts up to `KEEN` seconds, so that no server puts nodes to
    sleep.
    """
    keen = min(max(SHARE * idle_for, spacing), KEEN)
    return min(max(busy, keen, LONG_SHARE * idle_for), idle)


class Pace:
    """The pauses of one node; see `pause`. `generator` draws their jitter."""

    def __init__(
        self,
        *,
        busy: float,
        idle: float,
        generator: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._busy = busy
        self._idle = idle
        self._generator = generator
        self._clock = clock
        self._spacing = 0.0
        self._polled_for = 0.0
        self._last_work = clock()

    def worked(self) -> None:
        """Record that there was work just now."""
        self._last_work = self._clock()

    def space(self, seconds: float) -> None:
        """Set the server's wish for the seconds between polls."""
        self._spacing = seconds if math.isfinite(seconds) else 0.0

    def draw_wait(self) -> float:
        """Draw the seconds for which the next poll may wait at the SuperLink."""
        return MAX_WAIT * self._generator.uniform(1 - JITTER, 1)

    def polled(self, seconds: float) -> None:
        """Record how long a poll took."""
        self._polled_for = seconds

    @property
    def has_waited(self) -> bool:
        """Whether the last poll has waited as long as any may: the SuperLink lets polls wait."""
        return self._polled_for >= (1 - JITTER) * MAX_WAIT

    def draw(self) -> float:
        """Draw the seconds to wait until the next poll; none after one that has waited."""
        if self.has_waited:
            return 0.0
        longest = pause(self.idle_for, busy=self._busy, idle=self._idle, spacing=self._spacing)
        return longest * self._generator.uniform(1 - JITTER, 1)

    @property
    def idle_for(self) -> float:
        """Seconds since the last work."""
        return self._clock() - self._last_work
