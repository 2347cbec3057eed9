"""Shows the log of a run as it comes: rounds, phases, warnings and errors."""

from __future__ import annotations

import re
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.text import Text

from flwr_distill.cli.waiting import Waiting

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_LEVEL = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) *: {2,}")
_CHATTER = re.compile(
    r"\s*$|\[ROUND |(configure|aggregate)_\w+: |\s*[├└│]|Starting \w+ strategy"
    r"|fraction_evaluate is set to 0\.0|(Initial g|G)lobal evaluation"
    r"|Strategy execution finished|Start `flwr-"
)
"""What Flower's strategies say in every round: no news beside our own lines."""
_RECORDS = "Final results:"
"""Flower's; the indented lines after it have the records of all rounds, which the report shows."""
_ROUND = re.compile(r"round +\d+/\d+ ")
_PROGRESS = re.compile(r".+: \d+ of \d+ nodes?, ")
_RESULTS = re.compile(r"Results in (.+)")
_CRASH = "ServerApp raised an exception"
_STYLES = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red", "ROUND": "bold"}
_LONGEST = 1000


class RunLog:
    """Prints the lines of a ServerApp's log that are news, in a terminal coloured by level.

    A traceback is kept back: the error that ended the run comes with its status. While nothing
    comes, a terminal shows what the run is at.
    """

    def __init__(self, console: Console) -> None:
        self.folder: Path | None = None
        """The run's folder on the server, once it has said so."""
        self._console = console
        self._waiting = Waiting(console, "submitting the run ...")
        self._level = "INFO"
        self._crash: list[str] | None = None
        self._in_records = False
        self._last = ""

    def __enter__(self) -> Self:
        self._waiting.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._waiting.__exit__(kind, error, trace)

    def show(self, line: str) -> None:
        """Take the next line of the log."""
        line = _ANSI.sub("", line)
        if prefix := _LEVEL.match(line):
            self._level, line = prefix[1], line[prefix.end() :]
        self._in_records = line == _RECORDS or (self._in_records and line[:1] in " \t")
        if self._in_records:
            return
        if self._crash is not None:
            self._crash.append(line)
        elif self._level == "ERROR" and line.startswith(_CRASH):
            self._crash = []
        elif line != self._last and not _CHATTER.match(line):
            self._last = line
            # Nodes' texts are in it: no control characters, and not without end.
            self._show("".join(c if c.isprintable() else " " for c in line[:_LONGEST]))

    def _show(self, line: str) -> None:
        if found := _RESULTS.match(line):
            self.folder = Path(found[1])
        if line.startswith("started run "):
            self._waiting.what = "starting the server's app ..."
        elif self._console.is_terminal and self._level == "INFO" and _PROGRESS.match(line):
            self._waiting.what = line
            return
        else:
            self._waiting.what = "the run continues ..."
        level = "ROUND" if _ROUND.match(line) else self._level
        said = f"{level.lower()}: {line}" if level in ("WARNING", "ERROR", "CRITICAL") else line
        self._console.print(Text(said, _STYLES.get(level, "")), soft_wrap=True)

    def reason(self, details: str) -> str:
        """Why a run failed, in one line, from the details of its status.

        Errors of Python's own are mistakes in the code, so theirs has the traceback before it.
        """
        said = " ".join(details.removeprefix("ServerApp failed with exception: ").split())
        name = _exception_name(self._crash or [])
        if not name or "." in name:
            return said
        self._console.print(Text("\n".join(self._crash or [])), soft_wrap=True)
        return f"{name}: {said}"


def _exception_name(traceback: list[str]) -> str:
    """Qualified name of the exception that a traceback ends with."""
    frames = [i for i, line in enumerate(traceback) if line.startswith("  File ")]
    after = traceback[frames[-1] + 1 :] if frames else []
    return next((line.partition(":")[0] for line in after if not line.startswith(" ")), "")
