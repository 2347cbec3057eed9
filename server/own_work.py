"""Warns when the server itself works for longer than a phase may take: it may hang.

Phases with nodes have deadlines. What a strategy, an evaluation or a hook does on the server has
none, as nobody knows how long it may take.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from logging import WARNING
from pathlib import Path

from flwr.common import log

from flwr_distill.server.grid.transport import Transport

EVERY = 1.0
"""Seconds between checks."""
FRAMES = 3


class OwnWork:
    """Watches the thread that enters it; a context manager.

    Each stretch of work beyond `seconds` is a warning in log and journal, once, which names the
    innermost calls.
    """

    def __init__(self, transport: Transport, seconds: float) -> None:
        self._transport = transport
        self._seconds = seconds
        self._over = threading.Event()
        self._worker = 0

    def __enter__(self) -> OwnWork:
        self._worker = threading.get_ident()
        self._transport.idle_since = time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()

    def _watch(self) -> None:
        warned = 0.0
        while not self._over.wait(EVERY):
            since = self._transport.idle_since
            if since is None or since == warned:
                continue
            if time.monotonic() - since > self._seconds:
                warned = since
                log(
                    WARNING,
                    "The server itself has worked for over %.0f s, the phase-timeout, in %s (if it "
                    "hangs, end the run with `flwr-distill stop RUN`)",
                    self._seconds,
                    _place(self._worker),
                )


def _place(thread: int) -> str:
    """The innermost calls of a thread, from outer to inner."""
    calls = traceback.extract_stack(sys._current_frames().get(thread))[-FRAMES:]
    return ", ".join(f"{call.name} ({Path(call.filename).name}:{call.lineno})" for call in calls)
