"""Logs the progress of a long phase."""

import time
from collections.abc import Iterable, Mapping, Sequence
from logging import INFO

from flwr.common import log

from flwr_distill.base.text import counted, listed
from flwr_distill.server.record.phase_file import Phase, PhaseFile

EVERY = 4.0
"""Seconds between lines; a tenth of what the phase has taken, where that is more."""
LONG = 20.0
"""Seconds without any reply after which one line says why nodes may be slow."""


class Progress:
    """The progress of a phase; `names` are those of nodes by id, which nodes may not have yet.

    A `file` shows it too, with the `seconds` that the phase may take.
    """

    def __init__(
        self,
        title: str,
        total: int,
        names: Mapping[int, str],
        file: PhaseFile | None = None,
        seconds: float = 0.0,
    ) -> None:
        self._title = title
        self._file = file
        self._names = names
        self._total = total
        self._start = self._shown = time.monotonic()
        self._explained = False
        self._phase = Phase(title, self._start, self._start + seconds, total)

    def end(self) -> None:
        """Show that the phase is over."""
        if self._file:
            self._file.end()

    def show(self, waiting: Iterable[int]) -> None:
        """Log which nodes' replies are missing, and the time left at the others' pace."""
        waiting = list(waiting)
        if self._file:
            names = [self._names.get(n, f"node …{str(n)[-5:]}") for n in sorted(waiting)]
            self._file.show(self._phase, names)
        now = time.monotonic()
        seconds = now - self._start
        if now - self._shown < max(EVERY, seconds / 10):
            return
        if not (missing := sorted(waiting)):
            return
        self._shown = now
        replied = self._total - len(missing)
        when = f"{seconds:.0f} s so far"
        if replied:
            when = f"about {seconds / replied * len(missing):.0f} s left"
        elif seconds > LONG and not self._explained:
            self._explained = True
            when += "; nodes that are busy with another run reply once they are done with it"
        who = self._who(missing)
        nodes = counted(self._total, "node")
        log(INFO, "%s: %d of %s, waiting for %s, %s", self._title, replied, nodes, who, when)

    def _who(self, nodes: Sequence[int]) -> str:
        """The nodes by name; those without one are counted, since ids say nothing to a reader."""
        names = [self._names[node] for node in nodes if node in self._names]
        if len(names) == len(nodes):
            return listed(names)
        unnamed = f"{counted(len(nodes) - len(names), 'node')} not yet known by name"
        return f"{listed(names)} and {unnamed}" if names else unnamed
