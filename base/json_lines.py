"""Log lines as JSON, one object a line: what a text has in it begins no line and forges no field.

A process writes them where the environment asks for it, and says what its lines are about.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass, fields
from datetime import UTC, datetime

VARIABLE = "FLWR_DISTILL_LOG_FORMAT"
"""Environment variable, ``text`` or ``json``; the option ``--log-format`` sets it."""
NODE = "FLWR_DISTILL_LOG_NODE"
"""Environment variable of a node's processes with its name."""
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
MAX_TEXT = 10_000
"""Characters of a text; the rest is left out."""

_process: dict[str, str] = {}
_message: dict[str, str] = {}


@dataclass(frozen=True)
class Line:
    """A line of a log; an unknown field is empty."""

    text: str
    level: str = "INFO"
    time: str = ""
    process: str = ""
    node: str = ""
    """The node's name: of the process, or what a line of the server is about."""
    run: str = ""
    message_id: str = ""
    """Flower's id of the message that is worked on, the same on the server and on its node."""


def wanted() -> bool:
    """Whether this process writes JSON."""
    return os.environ.get(VARIABLE) == "json"


def begin(process: str, **about: str) -> None:
    """Have Flower's log written as JSON where that is wanted, about a process, and its node or run.

    Flower's empty lines are left out.
    """
    if not wanted():
        return
    _process.clear()
    _process.update({"process": process, "node": os.environ.get(NODE, ""), **about})
    for handler in logging.getLogger("flwr").handlers:
        handler.format = _of_record  # type: ignore[method-assign]
        handler.addFilter(_has_text)


def work_on(run: int | None = None, message_id: str = "") -> None:
    """Let the next lines be about a message; without arguments, about none."""
    _message.clear()
    if run is not None:
        _message.update(run=str(run), message_id=message_id)


def written(text: str, level: str = "INFO", **about: str) -> str:
    """A line with this text, about the process, its message, and what is given besides."""
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    line = {"time": time, "level": level, **_process, **_message, **about, "text": text[:MAX_TEXT]}
    return json.dumps({name: value for name, value in line.items() if value})


def read(line: str) -> Line | None:
    """A line that `written` made, or anyone who writes the same; None for another text."""
    try:
        values = json.loads(line) if line.startswith("{") else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or not isinstance(values.get("text"), str):
        return None
    names = [field.name for field in fields(Line)]
    known = {name: values[name] for name in names if isinstance(values.get(name), str)}
    return Line(**known) if known.get("level", "INFO") in LEVELS else None


def _of_record(record: logging.LogRecord) -> str:
    text = record.getMessage()
    if record.exc_info:
        text += "\n" + logging.Formatter().formatException(record.exc_info)
    return written(text, record.levelname, **getattr(record, "about", {}))


def _has_text(record: logging.LogRecord) -> bool:
    return bool(record.getMessage().strip())
