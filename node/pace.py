"""How often to look for work: often while there is some, seldom on an idle node."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """The pause between two looks, short for a while after work was last found.

    Parameters
    ----------
    busy : float
        Seconds between two looks within `keen` seconds of the last work.
    idle : float
        Seconds between two looks after that.
    keen : float (default: 10.0)
        Seconds for which work is expected to be followed by more.
    clock : Callable[[], float] (default: time.monotonic)
        The time in seconds.
    """

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
        """Note that there was work just now."""
        self._last_work = self._clock()

    @property
    def pause(self) -> float:
        """Seconds to wait until the next look."""
        return self._busy if self.idle_for < self._keen else self._idle

    @property
    def idle_for(self) -> float:
        """Seconds since there was work."""
        return self._clock() - self._last_work
