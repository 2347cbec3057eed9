"""The outbox log: one line for everything that has left a node, each chained to the one before."""

from __future__ import annotations

import datetime
import errno
import hashlib
import json
import os
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flwr_distill.base.files import replacing
from flwr_distill.task.errors import ReportedError

FOLDER = "outbox"
"""Folder in a node's state directory."""

FIRST = "0" * 64
"""What the first line is chained to."""

MAX_KEPT = 2**31
"""Bytes of virtual data that are kept: an app can send any, and must not fill the disk."""

_DAY = datetime.timedelta(days=1)

Entry = dict[str, Any]


class OutboxError(ReportedError):
    """The log was changed, or is not writable."""


class Outbox:
    """Appends to a node's log; a line is on disk before what it records leaves.

    `folder` holds ``log.jsonl``, and the virtual data that have left in ``virtual-data``.
    OutboxError if the chain is broken or unreadable.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = log_file(folder)
        self._number, self._last = 0, FIRST
        self._of_today: deque[tuple[datetime.datetime, int]] = deque()
        try:
            self._size = _whole_lines(self._file)
            for entry in entries(folder):
                self._number, self._last = entry["number"], entry["hash"]
                now = datetime.datetime.fromisoformat(entry["time"])
                self._of_today.append((now, entry["bytes"]))
                self._drop_old(now)
        except OSError as error:
            raise OutboxError(f"unreadable: {error.strerror}", where=self._file) from error

    def append(self, now: datetime.datetime, num_bytes: int, **about: Any) -> None:
        """Append a line on what leaves, and sync it to disk; `about` holds values of JSON.

        OutboxError if the file is not writable, or another process has changed it.
        """
        entry = {
            "number": self._number + 1,
            "time": now.isoformat(timespec="seconds"),
            **about,
            "bytes": num_bytes,
            "previous": self._last,
        }
        entry["hash"] = _hash(entry)
        line = json.dumps(entry).encode() + b"\n"
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            number = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                if os.fstat(number).st_size != self._size:
                    raise OutboxError("was changed by another process", where=self._file)
                self._write(number, line)
            finally:
                os.close(number)
        except OSError as error:
            raise OutboxError(f"not writable: {error.strerror}", where=self._file) from error
        self._number, self._last = self._number + 1, entry["hash"]
        self._size += len(line)
        self._of_today.append((now, num_bytes))

    def _write(self, number: int, line: bytes) -> None:
        try:
            if os.write(number, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(number)
        except OSError:
            os.ftruncate(number, self._size)
            raise

    def keep(self, payload: bytes) -> str:
        """Keep virtual data that leave; return their SHA-256, which is their file's name.

        OutboxError if they are not writable, or too many.
        """
        name = hashlib.sha256(payload).hexdigest()
        file = virtual_data_file(self._folder, name)
        if not file.exists():
            try:
                size = sum(each.stat().st_size for each in file.parent.glob("*"))
                if size + len(payload) > MAX_KEPT:
                    raise OutboxError(
                        f"has {size:,} bytes, and may have {MAX_KEPT:,}",
                        where=file.parent,
                        remedy="the node's owner can move what is there elsewhere",
                    )
                file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                with replacing(file) as partial:
                    partial.touch(mode=0o600)
                    partial.write_bytes(payload)
            except OSError as error:
                raise OutboxError(f"not writable: {error.strerror}", where=file) from error
        return name

    def bytes_of_a_day(self, now: datetime.datetime) -> int:
        """Bytes that have left in the 24 hours before `now`."""
        self._drop_old(now)
        return sum(num_bytes for _, num_bytes in self._of_today)

    def _drop_old(self, now: datetime.datetime) -> None:
        while self._of_today and self._of_today[0][0] <= now - _DAY:
            self._of_today.popleft()


def log_file(folder: Path) -> Path:
    """File of the log."""
    return folder / "log.jsonl"


def virtual_data_file(folder: Path, name: str) -> Path:
    """File of virtual data that have left."""
    return folder / "virtual-data" / name


def entries(folder: Path) -> Iterator[Entry]:
    """Read a log's lines in order; OutboxError at the first that breaks the chain."""
    file, previous = log_file(folder), FIRST
    if not file.exists():
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                entry = json.loads(line)
                whole = (
                    entry["previous"] == previous
                    and entry["number"] == number
                    and entry["hash"] == _hash(entry)
                )
            except (ValueError, TypeError, KeyError, RecursionError):
                whole = False
            if not whole:
                raise OutboxError(
                    f"the chain breaks at line {number}: it was changed, or lines before it are "
                    "missing",
                    where=file,
                )
            previous = entry["hash"]
            yield entry


def _hash(entry: Mapping[str, Any]) -> str:
    content = {key: value for key, value in entry.items() if key != "hash"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _whole_lines(file: Path) -> int:
    """Bytes of a log, without the half line of a power cut: what it records has not left."""
    if not file.exists():
        return 0
    content = file.read_bytes()
    size = content.rfind(b"\n") + 1
    if size < len(content):
        os.truncate(file, size)
    return size
