"""How fast and when a node moves contents over its link: models, parcels and app bundles.

Heartbeats, polls and other small calls are not contents, and never wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from datetime import time as clock_time
from random import uniform
from typing import TypeVar

T = TypeVar("T")

STEP = 1.0
"""Seconds after which a pause reads the clocks again: they may jump, and the node may end."""
DELAY = 0.01
"""Share of the quiet hours, at most, by which a node continues later, drawn: not all at once."""
MAX_DELAY = 60.0
"""Seconds of it, at most."""
_DAY = 86_400.0


@dataclass(frozen=True)
class QuietHours:
    """From `start` to `end` each day, on the site's clock; they may cross midnight."""

    start: clock_time
    end: clock_time

    @classmethod
    def parse(cls, text: str) -> QuietHours:
        """Read ``08:00-18:00``; raises ValueError, with the remedy, if it is no such text."""
        start, _, end = text.partition("-")
        try:
            hours = cls(clock_time.fromisoformat(start), clock_time.fromisoformat(end))
        except ValueError:
            hours = None
        if hours is None or hours.start.tzinfo or hours.end.tzinfo:
            raise ValueError("must be HH:MM-HH:MM in local time, as in 08:00-18:00")
        if not hours.length:
            raise ValueError("must have two different times, as in 08:00-18:00")
        return hours

    @property
    def length(self) -> float:
        """Seconds from start to end."""
        return (_seconds(self.end) - _seconds(self.start)) % _DAY

    def left(self, now: datetime) -> float:
        """Seconds until they end; 0 outside of them."""
        return max(0.0, self.length - (_seconds(now) - _seconds(self.start)) % _DAY)


def _seconds(moment: clock_time | datetime) -> float:
    """Since midnight."""
    minutes = 60 * moment.hour + moment.minute
    return 60 * minutes + moment.second + moment.microsecond / 1e6


def local_time() -> datetime:
    """The site's time, without a zone; another zone of the machine counts at once."""
    time.tzset()
    return datetime.now()


class Link:
    """Moves contents at a rate, and not in quiet hours.

    `max_rate` is in megabits per second, for both directions together; None for no limit. With one,
    contents move one after the other. Bytes are counted once they have moved, whatever was
    announced; the next content waits until the rate has paid for them. An idle link saves nothing.

    `report` gets the local time at which quiet hours end when they start, and None when they are
    over.
    """

    def __init__(
        self,
        max_rate: float | None = None,
        quiet_hours: QuietHours | None = None,
        report: Callable[[datetime | None], None] = lambda until: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = local_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_second = max_rate and max_rate * 1e6 / 8
        self._hours = quiet_hours
        most = DELAY * quiet_hours.length if quiet_hours else 0.0
        self._later = timedelta(seconds=uniform(0.0, min(MAX_DELAY, most)))
        self._report = report
        self._clock = clock
        self._now = now
        self._sleep = sleep
        self._turn = threading.Lock()
        self._reporting = threading.Lock()
        self._was_quiet = False
        self._paid_at = clock()
        self._ended = False

    def move(self, call: Callable[[], T], size: Callable[[T], int]) -> T:
        """Make a call once contents may move; count `size` bytes of its result.

        RuntimeError if the node ends meanwhile.
        """
        with self._turn if self._bytes_per_second else nullcontext():
            while (seconds := max(self.quiet(), self._paid_at - self._clock())) > 0:
                if self._ended:
                    raise RuntimeError("the node ends")
                self._sleep(min(seconds, STEP))
            content = call()
            if self._bytes_per_second:
                owed = size(content) / self._bytes_per_second
                self._paid_at = max(self._paid_at, self._clock()) + owed
            return content

    def quiet(self) -> float:
        """Seconds until contents may move after the quiet hours; 0 outside of them."""
        if self._hours is None:
            return 0.0
        with self._reporting:
            now = self._now()
            left = max(self._hours.left(now), self._hours.left(now - self._later))
            if self._was_quiet != (left > 0):
                self._was_quiet = left > 0
                until = now + timedelta(seconds=left)
                self._report(until.replace(microsecond=0) if left else None)
        return left

    def end(self) -> None:
        """Let no content wait any longer: the node ends. A signal handler may call it."""
        self._ended = True
