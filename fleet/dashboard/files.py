"""Reads files of a run's folder within bounds: its ServerApp, which may be anyone's, wrote them."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from flwr_distill.server.page.run_files import RunFiles

MAX_FILE = 4 * 2**20
"""Bytes of a JSON file that is read."""
MAX_LINE = 256 * 2**10
"""Bytes of a line; longer ones are skipped, as are phases of a thousand nodes."""
MAX_LINES = 4 * 2**20
"""Bytes of lines that one call reads; the next one continues there."""
MAX_COPIED = 64 * 2**20
"""Bytes of a JSON file that is copied for an export."""
MAX_ENTRIES = 100
"""Names of a folder that are looked at."""
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


def is_plain(name: str) -> bool:
    """Whether a name of a run's folder, or of a file in it, is one that a run would choose."""
    return _PLAIN.fullmatch(name) is not None


def read_json(path: Path, limit: int = MAX_FILE) -> dict[str, Any]:
    """The object in a file; empty if it is missing, too large, or contains something else."""
    try:
        with open_file(path) as file:
            content = file.read(limit + 1)
    except OSError:
        return {}
    return _object(content) if len(content) <= limit else {}


@dataclass
class Lines:
    """The objects in a growing file of JSON lines."""

    path: Path
    is_behind: bool = False
    """Whether the last call left lines for the next one."""
    _offset: int = 0
    _file: tuple[int, int] = (0, 0)
    _skips: bool = False

    def new(self) -> tuple[bool, list[dict[str, Any]]]:
        """Whether the file was replaced or cut, and the objects since the last call, or of all."""
        self.is_behind = False
        try:
            with open_file(self.path) as file:
                status = os.fstat(file.fileno())
                here = (status.st_dev, status.st_ino)
                restarted = self._file != here or status.st_size < self._offset
                if restarted:
                    self._file, self._offset, self._skips = here, 0, False
                content = os.pread(file.fileno(), MAX_LINES, self._offset)
        except OSError:
            return False, []
        self.is_behind = len(content) == MAX_LINES
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


def read_run(folder: Path) -> RunFiles:
    """A run's files as `server.page.run_files.read_run` gives them, within bounds."""

    def lines(name: str) -> list[dict[str, Any]]:
        return Lines(folder / name).new()[1]

    def content(name: str) -> dict[str, Any]:
        return read_json(folder / f"{name}.json")

    return RunFiles(
        folder=folder,
        settings=content("settings"),
        about=content("about"),
        rows=lines("metrics.jsonl"),
        journal=lines("journal.jsonl"),
        topology=content("topology"),
        traffic=content("traffic"),
        partition=content("partition"),
        statistics=content("statistics"),
    )


def copy_run(folder: Path, target: Path) -> None:
    """Copy what an export of a run reads; OSError if a file is missing, or is none of a run's."""
    target.mkdir()
    for name in ("settings.json", "about.json", "metrics.jsonl", "journal.jsonl"):
        _copy(folder / name, target / name, 2, MAX_COPIED)
    for name in ("summary.json", "traffic.json", "topology.json", "partition.json"):
        if (folder / name).is_file():
            _copy(folder / name, target / name, 2, MAX_COPIED)
    for name in ("model.safetensors", "frozen.safetensors"):
        if (folder / name).is_file():
            _copy(folder / name, target / name, 2)
    checkpoints = sorted(filter(is_plain, names_in(folder / "checkpoints")))
    if checkpoints and not (target / "model.safetensors").exists():
        (target / "checkpoints").mkdir()
        file = Path("checkpoints", checkpoints[-1])
        _copy(folder / file, target / file, 3)


def names_in(folder: Path) -> list[str]:
    """Names in a folder, a bounded number; empty if it is missing or behind a link."""
    try:
        with _inside(folder, 2, os.O_DIRECTORY) as number, os.scandir(number) as entries:
            return [entry.name for entry in islice(entries, MAX_ENTRIES)]
    except OSError:
        return []


def open_file(path: Path, below: int = 2) -> BinaryIO:
    """A regular file, open for reading; OSError if it is missing or something else.

    No link is followed in the last `below` names of the path, and no pipe waited for.
    """
    with _inside(path, below, os.O_NONBLOCK) as number:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError(f"{path} is no regular file")
        return os.fdopen(os.dup(number), "rb")


@contextmanager
def _inside(path: Path, below: int, flags: int) -> Iterator[int]:
    flags |= os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    root, *names = path.parents[below - 1], *path.parts[-below:]
    number = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names:
            inner = os.open(
                name, flags if name == names[-1] else flags | os.O_DIRECTORY, dir_fd=number
            )
            os.close(number)
            number = inner
        yield number
    finally:
        os.close(number)


def _copy(source: Path, target: Path, below: int, limit: int | None = None) -> None:
    with open_file(source, below) as file, target.open("xb") as copy:
        if limit is not None and os.fstat(file.fileno()).st_size > limit:
            raise OSError(f"{source.name} is too large to export: over {limit} bytes")
        shutil.copyfileobj(file, copy)


def _object(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
