"""What a run shows in the terminal: its log, what it waits for, and its results."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from flwr_distill.base import json_lines
from flwr_distill.fleet.submission import KILLED, gave_no_reason
from flwr_distill.node.log_lines import without_level
from flwr_distill.task.errors import REMEDIES, with_remedy

if TYPE_CHECKING:
    from flwr_distill.strategies.common.sections import Table as PageTable


class Waiting:
    """A spinner below the output of a terminal: ``starting ... 12 s``, since `what` changed."""

    def __init__(self, console: Console, what: str) -> None:
        self._what, self._since = what, time.monotonic()
        self._status = console.status("")
        self._status.update(self)  # a renderable, drawn again each time

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._status.stop()

    def __rich__(self) -> Text:
        seconds = time.monotonic() - self._since
        return Text(f"{self._what} {seconds:.0f} s" if seconds >= 1 else self._what)

    def show(self, what: str) -> None:
        """Say what is waited for."""
        if what != self._what:
            self._what, self._since = what, time.monotonic()


_CHATTER = re.compile(
    r"\s*$|\[ROUND |(configure|aggregate)_\w+: |\s*[├└│]|Starting \w+ strategy"
    r"|fraction_evaluate is set to 0\.0|(Initial g|G)lobal evaluation"
    r"|Strategy execution finished|Start `flwr-"
)
"""Lines that Flower's strategies log in every round, with nothing that ours do not have."""
_RECORDS = "Final results:"
"""Flower's: indented lines with the records of all rounds follow, which the report shows."""
_ROUND = re.compile(r"round +\d+/\d+ ")
_PROGRESS = re.compile(r".+: \d+ of \d+ nodes?, ")
_RESULTS = re.compile(r"Results in (.+)")
_CRASH = "ServerApp raised an exception"
STYLES = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red", "ROUND": "bold"}
_MAX_CHARACTERS = 1000


class RunLog:
    """Prints a ServerApp's log without Flower's repetitions, in a terminal coloured by level.

    A traceback is left to `reason`, since the run's status has its error. Between lines, a terminal
    shows what the run is doing.
    """

    def __init__(self, console: Console) -> None:
        self.folder: Path | None = None
        """The run's folder on the server, once the log names it."""
        self._console = console
        self._waiting = Waiting(console, "submitting the run ...")
        self._level = "INFO"
        self._crash: list[str] | None = None
        self._in_records = False
        self._last = ""

    def __enter__(self) -> Self:
        self._waiting.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._waiting.__exit__(*error)

    def show(self, line: str) -> None:
        """Take the next line of the log; as JSON, without those about single messages."""
        if (entry := json_lines.read(line)) is None:
            self._take(*without_level(line))
        elif not entry.message_id:
            for part in entry.text.splitlines():
                self._take(entry.level, part)

    def _take(self, level: str, line: str) -> None:
        self._level = level or self._level
        self._in_records = line == _RECORDS or (self._in_records and line[:1] in " \t")
        if self._in_records:
            return
        if self._crash is not None:
            self._crash.append(line)
        elif self._level == "ERROR" and line.startswith(_CRASH):
            self._crash = []
        elif line != self._last and not _CHATTER.match(line):
            self._last = line
            # Nodes' texts are in it: no control characters, and a bounded length.
            self._show("".join(c if c.isprintable() else " " for c in line[:_MAX_CHARACTERS]))

    def _show(self, line: str) -> None:
        if match := _RESULTS.match(line):
            self.folder = Path(match[1])
        if line.startswith("started run "):
            self._waiting.show("starting the server's app ...")
        elif self._console.is_terminal and self._level == "INFO" and _PROGRESS.match(line):
            self._waiting.show(line)
            return
        else:
            self._waiting.show("the run continues ...")
        level = "ROUND" if _ROUND.match(line) else self._level
        text = f"{level.lower()}: {line}" if level in ("WARNING", "ERROR", "CRITICAL") else line
        self._console.print(Text(text, STYLES.get(level, "")), soft_wrap=True)

    def reason(self, details: str) -> str:
        """Why a run failed, in one line, from the details of its status.

        A builtin exception is a mistake in the code, so its traceback is printed.
        """
        text = " ".join(details.removeprefix("ServerApp failed with exception: ").split())
        if gave_no_reason(text):
            return KILLED
        name = _exception_name(self._crash or [])
        if name in REMEDIES:
            return with_remedy(name, text)
        if not name or "." in name:
            return text
        self._console.print(Text("\n".join(self._crash or [])), soft_wrap=True)
        return f"{name}: {text}"


def _exception_name(traceback: list[str]) -> str:
    frames = [i for i, line in enumerate(traceback) if line.startswith("  File ")]
    after = traceback[frames[-1] + 1 :] if frames else []
    return next((line.partition(":")[0] for line in after if not line.startswith(" ")), "")


def results_table(title: str, results: Mapping[str, Mapping[str, Any]]) -> Table:
    """Table of runs from their ``summary.json``, by run name, with their warnings."""
    from flwr_distill.server.page.words import stated  # here: its package imports much

    table = Table(title=title)
    for column in ("strategy", "accuracy", "rounds to 80 %", "server MB", "link MB", "seconds"):
        justify: Literal["left", "right"] = "left" if column == "strategy" else "right"
        table.add_column(column, justify=justify, overflow="fold")
    for name, result in results.items():
        table.add_row(
            name,
            stated(result),
            str(result["rounds"] or "not reached"),
            f"{result['server_bytes'] / 1e6:.2f}",
            f"{result['link_bytes'] / 1e6:.3f}",
            f"{result['seconds']:.0f}",
        )
    warnings = dict.fromkeys(text for r in results.values() for text in r.get("warnings", ()))
    if warnings:
        table.caption = Text("\n".join(warnings), style="yellow", justify="left")
    return table


MAX_CELL = 30
"""Characters of a cell for which a table in the terminal makes room; longer ones are folded."""
_FRAME = 3
"""Characters of a column's frame and padding."""


def print_table(console: Console, title: str, table: PageTable, keys: int = 1) -> None:
    """Print a table of a page; if its words do not fit side by side, in parts below each other.

    Each part has the first `keys` columns, by which rows are known.
    """
    texts = [
        (column.lstrip("#"), [row[place] for row in table.rows])
        for place, column in enumerate(table.columns)
    ]
    words = [_width([*name.split(), *" ".join(cells).split()]) for name, cells in texts]
    lines = [_width([name, *cells]) for name, cells in texts]
    room = console.width - 1  # for the frame on the right
    parts = [list(range(len(texts)))]
    if sum(words) > room:
        parts = [list(range(keys))]
        for place in range(keys, len(texts)):
            taken = sum(lines[each] for each in parts[-1])
            if len(parts[-1]) > keys and taken + lines[place] > room:
                parts.append(list(range(keys)))
            parts[-1].append(place)
    for number, part in enumerate(parts):
        console.print(_in_terminal(f"{title}, continued" if number else title, table, part))


def _width(texts: Sequence[str]) -> int:
    """Width of a column with these texts, none of which is folded."""
    return min(max(map(cell_len, texts), default=0), MAX_CELL) + _FRAME


def _in_terminal(title: str, table: PageTable, part: Sequence[int]) -> Table:
    """Columns of a table of a page, for the terminal."""
    printed = Table(title=escape(title))
    for place in part:
        column = table.columns[place]
        printed.add_column(
            escape(column.lstrip("#")),
            justify="right" if column.startswith("#") else "left",
            overflow="fold",
        )
    for row in table.rows:
        printed.add_row(*(escape(row[place]) for place in part))
    return printed
