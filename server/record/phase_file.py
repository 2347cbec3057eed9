"""The phase that a run is in, as a file of its folder, for those who watch the run."""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path

from flwr.common import log

PHASE = "phase.json"
MAX_NAMES = 100
"""Names of awaited nodes in the file; the others are counted."""
EVERY = 1.0
"""Seconds between writes; shorter phases leave no trace here."""


@dataclass(frozen=True)
class Phase:
    """A phase: how many nodes it asks, and from when until when, in monotonic seconds."""

    title: str
    since: float
    until: float
    asked: int


@dataclass
class PhaseFile:
    """Writes ``phase.json``: what the run waits for, since when, and for whom.

    It also has the run's id, as a resumed run writes into the folder of an earlier one. `progress`
    gives the round and the bytes between server and nodes so far. A file that cannot be written is
    a warning, once: watching a run must not end it.
    """

    file: Path
    run_id: int
    progress: Callable[[], tuple[int, int]]
    _written: float = 0.0
    _is_open: bool = False
    _failed: bool = False

    def begin(self) -> None:
        """Write that the run has started."""
        self._write()

    def show(self, phase: Phase, awaited: Sequence[str], unnamed: int = 0) -> None:
        """Write for whom a phase waits: nodes by name, and how many without one.

        Writes at most each `EVERY` seconds.
        """
        now = time.monotonic()
        if now - max(phase.since, self._written) < EVERY:
            return
        self._is_open = True
        names = list(awaited[:MAX_NAMES])
        self._write(
            phase=phase.title,
            since=round(time.time() - (now - phase.since), 1),
            until=round(time.time() + phase.until - now, 1),
            asked=phase.asked,
            awaited=names,
            others=len(awaited) - len(names) + unnamed,
        )

    def end(self) -> None:
        """Write that the phase is over."""
        if self._is_open:
            self._is_open = False
            self._write()

    def _write(self, **content: object) -> None:
        self._written = time.monotonic()
        server_round, num_bytes = self.progress()
        content |= {"run": str(self.run_id), "time": round(time.time(), 1)}
        content |= {"round": server_round, "server_bytes": num_bytes}
        new = self.file.with_name(f".{self.file.name}")
        try:
            new.write_text(json.dumps(content), encoding="utf-8")
            os.replace(new, self.file)
        except OSError as error:
            if not self._failed:
                log(WARNING, "%s is not up to date: %s", self.file, error.strerror)
            self._failed = True
