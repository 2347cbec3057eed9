"""Lines of a node's log that no message and no app can forge.

Texts of messages are escaped. What a sandboxed app prints comes through a pipe, and gets a title.
Where the log is JSON, that holds without a sandbox too.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

MAX_LINE = 4_000
"""Bytes of a line of an app; a longer one becomes several."""
MAX_OUTPUT = 1 << 24
"""Bytes that an app's processes may add to the log, which is on the disk of its node."""

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_BREAKS = re.compile(rb"[\r\n]+")
_LEVEL = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) *: {2,}")
"""Begins a line of Flower's log, without colours."""


def escaped(text: str) -> str:
    """A text in one line, without characters that a terminal does not show or obeys."""
    return "".join(
        character
        if character.isprintable() or character == "\t"
        else character.encode("unicode_escape").decode()
        for character in text
    )


def begin(process: str) -> None:
    """Have Flower's log of one of a node's processes escaped; or as JSON, where that is wanted."""
    # here: what a nursery imports, apps cannot bring
    from flwr_distill.base import json_lines

    if json_lines.wanted():
        json_lines.begin(process)
    else:
        escape_records(logging.getLogger("flwr"))


def escape_records(logger: logging.Logger) -> None:
    """Have a logger's handlers escape all texts, and indent each line after a record's first."""
    for handler in logger.handlers:
        handler.format = _escaping(handler.format)  # type: ignore[method-assign, assignment]


def _escaping(plain: Callable[[logging.LogRecord], str]) -> Callable[[logging.LogRecord], str]:
    def format_escaped(record: logging.LogRecord) -> str:
        shown = copy.copy(record)
        shown.msg, shown.args = indented(record.getMessage()), None
        if record.exc_info:
            traceback = logging.Formatter().formatException(record.exc_info)
            shown.exc_text = "    " + indented(traceback)
        return plain(shown)

    return format_escaped


def indented(text: str) -> str:
    """A text whose lines are escaped, and after the first one indented."""
    return "\n    ".join(escaped(line) for line in text.splitlines())


def without_level(line: str) -> tuple[str, str]:
    """A line of Flower's log as its level and text; the level is '' if it has none."""
    line = _COLOURS.sub("", line)
    prefix = _LEVEL.match(line)
    return (prefix[1], line[prefix.end() :]) if prefix else ("", line)


@dataclass
class OutputQuota:
    """Bytes that an app's processes may still add to the log, with titles and escapes."""

    left: float = MAX_OUTPUT


@contextmanager
def titled_output(title: str, quota: OutputQuota) -> Iterator[int]:
    """A file descriptor for what an app prints: titled lines in this process's standard error.

    It is closed here at the end; processes that inherit it can still print.
    """
    printed, output = os.pipe()
    arguments = printed, title, quota
    threading.Thread(target=_pass_on, args=arguments, name="output", daemon=True).start()
    try:
        yield output
    finally:
        os.close(output)


def _pass_on(printed: int, title: str, quota: OutputQuota) -> None:
    rest = b""
    try:
        while part := os.read(printed, 1 << 16):
            if quota.left <= 0:
                continue  # read all the same: the app must not block
            *lines, rest = _BREAKS.split(rest + part)
            if len(rest) > MAX_LINE:
                lines, rest = [*lines, rest], b""
            _write(title, lines, quota)
        _write(title, [rest], quota)
    finally:
        os.close(printed)


def _write(title: str, lines: list[bytes], quota: OutputQuota) -> None:
    parts = (line[i : i + MAX_LINE] for line in lines for i in range(0, len(line), MAX_LINE))
    with suppress(OSError, ValueError):  # nobody reads this process's log any more
        for part in parts:
            if quota.left <= 0:
                break
            line = _line(title, part.decode("utf-8", "replace"))
            quota.left -= len(line.encode())
            sys.stderr.write(line)
            if quota.left <= 0:
                sys.stderr.write(_line(title, "(further output is dropped)"))
        sys.stderr.flush()


def _line(title: str, text: str) -> str:
    from flwr_distill.base import json_lines  # here: as in `begin`

    if not json_lines.wanted():
        return f"{title}: {escaped(_COLOURS.sub('', text))}\n"
    level, text = without_level(text)
    return json_lines.written(text, level or "INFO", process="app") + "\n"
