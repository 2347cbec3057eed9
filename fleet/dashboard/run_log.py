"""The end of a run's log on its server, for those who look at the run."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from flwr_distill.base import json_lines
from flwr_distill.flower.control import Control, SuperLinkError
from flwr_distill.node.log_lines import without_level

MAX_LINES = 200
MAX_TEXT = 1000
MAX_LOGS = 50
"""Runs whose logs are kept."""
EVERY = 2.0
READ = 1.0
"""Seconds between reads of a log, and for one."""


@dataclass
class _Log:
    lines: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=MAX_LINES))
    latest: float = 0.0
    unfinished: str = ""
    read: float = 0.0
    problem: str = ""


class RunLogs:
    """The last lines of runs' logs, as pairs of level and text; `control` opens the Control API."""

    def __init__(self, control: Callable[[], Control]) -> None:
        self._control = control
        self._logs: OrderedDict[str, _Log] = OrderedDict()

    def lines(self, run_id: str) -> tuple[list[tuple[str, str]], str]:
        """The lines of a run's log, and why there are no newer ones; reads at most each 2 s."""
        if not run_id.isdigit():
            return [], "it ran without this SuperLink"
        log = self._logs.setdefault(run_id, _Log())
        self._logs.move_to_end(run_id)
        while len(self._logs) > MAX_LOGS:
            self._logs.popitem(last=False)
        if time.monotonic() - log.read > EVERY:
            log.read = time.monotonic()
            self._read(run_id, log)
        return list(log.lines), log.problem

    def _read(self, run_id: str, log: _Log) -> None:
        try:
            with self._control() as control:
                for text, mark in control.log(int(run_id), log.latest, READ):
                    log.latest = mark
                    *whole, rest = (log.unfinished + text).split("\n")
                    log.unfinished = rest[-MAX_TEXT:]
                    log.lines.extend(shown_line(line) for line in whole if line.strip())
            log.problem = ""
        except SuperLinkError as error:
            log.problem = str(error)


def shown_line(line: str) -> tuple[str, str]:
    """Level and printable text of a line, which may be JSON; only bad levels are shown."""
    level, text = without_level(line)
    if entry := json_lines.read(line):
        level, text = entry.level, f"{entry.time[11:19]} {entry.text}"
    text = "".join(c if c.isprintable() or c == "\t" else "?" for c in text[:MAX_TEXT])
    return level if level in ("WARNING", "ERROR", "CRITICAL") else "", text
