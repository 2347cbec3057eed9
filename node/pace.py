"""How long to wait between polls: short after recent work, longer on an idle node."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """Pause between polls, in seconds: `busy` for `keen` seconds after work, then `idle`."""

    def __init__(
        self,
        *,
        busy: float,
        idle: float,
        keen: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._busy = busy
        self._idle = idle
        self._keen = keen
        self._clock = clock
        self._last_work = clock()

    def worked(self) -> None:
        """Record that there was work just now."""
        self._last_work = self._clock()

    @property
    def pause(self) -> float:
        """Seconds to wait until the next poll."""
        return self._busy if self.idle_for < self._keen else self._idle

    @property
    def idle_for(self) -> float:
        """Seconds since the last work."""
        return self._clock() - self._last_work
