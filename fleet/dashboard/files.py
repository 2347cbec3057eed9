"""Reads files of a run's folder within bounds: its ServerApp, which may be anyone's, wrote them."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_FILE = 32 * 2**20
"""Bytes of a file that is read whole."""
MAX_LINE = 4 * 2**20
"""Bytes of a line; longer ones are skipped."""
PART = 2**20
MAX_LINES = 16 * 2**20
"""Bytes of lines that one call reads; the next one continues there."""


def read_json(path: Path, limit: int = MAX_FILE) -> dict[str, Any]:
    """The object in a file; empty if it is missing, too large, or contains something else."""
    try:
        return _object(read_bytes(path, limit))
    except OSError:
        return {}


def parts_of(path: Path, below: int) -> Iterator[bytes]:
    """Content of a regular file of any size, part by part; OSError as `opened`."""
    with opened(path, below) as number, open(number, "rb", closefd=False) as file:
        while part := file.read(PART):
            yield part


def read_bytes(path: Path, limit: int = MAX_FILE) -> bytes:
    """Content of a regular file; OSError if it is missing, another kind of file, or too large."""
    with opened(path) as number:
        if (size := os.fstat(number).st_size) > limit:
            raise OSError(f"{path} has {size} bytes, {limit} at most are read")
        with open(number, "rb", closefd=False) as file:
            return file.read(limit)


@dataclass
class Lines:
    """The objects in a growing file of JSON lines."""

    path: Path
    _offset: int = 0
    _file: tuple[int, int] = (0, 0)
    _skips: bool = False

    def new(self) -> tuple[bool, list[dict[str, Any]]]:
        """Whether the file was replaced or cut, and the objects since the last call, or of all."""
        try:
            with opened(self.path) as number:
                status = os.fstat(number)
                here = (status.st_dev, status.st_ino)
                restarted = self._file != here or status.st_size < self._offset
                if restarted:
                    self._file, self._offset, self._skips = here, 0, False
                content = os.pread(number, MAX_LINES, self._offset)
        except OSError:
            return False, []
        return restarted, list(self._objects(content))

    def _objects(self, content: bytes) -> Iterator[dict[str, Any]]:
        *whole, rest = content.split(b"\n")
        self._offset += len(content) - len(rest)
        for line in whole:
            if not self._skips and len(line) <= MAX_LINE and (entry := _object(line)):
                yield entry
            self._skips = False
        if len(rest) > MAX_LINE:
            self._offset += len(rest)
            self._skips = True


@contextmanager
def opened(path: Path, below: int = 2) -> Iterator[int]:
    """Descriptor of a regular file.

    No link is followed in the last `below` names of the path, and no pipe waited for.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    root, *names = path.parents[below - 1], *path.parts[-below:]
    number = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names:
            inner = os.open(name, flags, dir_fd=number)
            os.close(number)
            number = inner
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError(f"{path} is no regular file")
        yield number
    finally:
        os.close(number)


def _object(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
