"""Files in folders that a hostile process may write: below ``runs`` and ``lasting`` of a node.

So no link is followed at any part of a path, only regular files of this user are opened, reads are
bounded, and a call takes bounded time, memory and file descriptors.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

MAX_ENTRIES = 100_000
"""Entries of a folder that a call sees or removes; the rest has its turn at the next call."""
MAX_DEPTH = 6
"""Levels of folders in which changes are noticed; ours has three below a run's node."""

MAX_MEASURED_DEPTH = 32
"""Levels of folders of which the use of the disk is measured."""

_PATH_ONLY = getattr(os, "O_PATH", os.O_RDONLY)  # elsewhere than on Linux
_BLOCK = 512  # bytes, on any file system
_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe that nobody writes does not block


@contextmanager
def folder(path: Path, *, create: bool = False) -> Iterator[int]:
    """Open a folder and yield its descriptor; OSError if any part of the path is a link.

    Where part of the path is trusted and may have links, resolve that first. `create` makes missing
    folders, for this user alone.
    """
    path = path.absolute()
    number = os.open(path.anchor, _PATH_ONLY | _FOLDER)
    try:
        for part in path.parts[1:]:
            if create:
                with suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=number)
            number = _stepped(number, os.open(part, _PATH_ONLY | _FOLDER, dir_fd=number))
        number = _stepped(number, os.open(".", os.O_RDONLY | _FOLDER, dir_fd=number))
        yield number
    finally:
        os.close(number)


def _stepped(number: int, into: int) -> int:
    os.close(number)
    return into


@contextmanager
def subfolder(parent: int, name: str) -> Iterator[int]:
    """Open a folder in a folder; OSError if it is missing, is a link, or is no folder."""
    number = os.open(name, os.O_RDONLY | _FOLDER, dir_fd=parent)
    try:
        yield number
    finally:
        os.close(number)


def names(parent: int) -> list[str]:
    """Names in a folder, in no order, hidden ones too."""
    with os.scandir(parent) as entries:
        return [entry.name for entry in islice(entries, MAX_ENTRIES)]


def is_folder(parent: int, name: str) -> bool:
    """Whether a name is a folder, and no link to one."""
    return stat.S_ISDIR(_status(parent, name).st_mode)


def is_file(parent: int, name: str) -> bool:
    """Whether a name is a regular file, and no link to one."""
    with suppress(OSError):
        return stat.S_ISREG(_status(parent, name).st_mode)
    return False


def size_and_change(parent: int, name: str) -> tuple[int, float]:
    """Bytes of a name, and when it was changed; of a link itself. OSError if it is gone."""
    status = _status(parent, name)
    return status.st_size, status.st_mtime


def read(parent: int, name: str, most: int | None = None) -> bytes:
    """Read a regular file of this user, and of a larger one the first `most` bytes and one.

    Raises OSError if it is missing, is a link or no regular file, or belongs to another user.
    """
    number = os.open(name, os.O_RDONLY | _FILE, dir_fd=parent)
    with os.fdopen(number, "rb") as file:
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise OSError(f"{name} is not a regular file of this user")
        return file.read(-1 if most is None else most + 1)


def write(parent: int, name: str, data: bytes, *, durable: bool = True) -> None:
    """Write a file for this user alone, atomically; a durable one survives a power cut."""
    with new_file(parent, name) as (number, partial):
        with os.fdopen(os.dup(number), "wb") as file:
            file.write(data)
        if durable:
            os.fsync(number)
        os.replace(partial, name, src_dir_fd=parent, dst_dir_fd=parent)
    if durable:
        os.fsync(parent)


@contextmanager
def new_file(parent: int, name: str) -> Iterator[tuple[int, str]]:
    """A new hidden file to write, and its name; it is removed at the end if it is still there."""
    partial = f".{name}.{secrets.token_hex(4)}"
    number = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=parent)
    try:
        yield number, partial
    finally:
        os.close(number)
        with suppress(FileNotFoundError):
            os.unlink(partial, dir_fd=parent)


def last_change(parent: int, name: str) -> float:
    """When a name or something in it was changed, of a bounded part; now, if it is gone."""
    changes = islice(_changes(parent, name, MAX_DEPTH), MAX_ENTRIES)
    return max(changes, default=time.time())


def _changes(parent: int, name: str, depth: int) -> Iterator[float]:
    with suppress(OSError):
        yield size_and_change(parent, name)[1]
        if depth > 0 and is_folder(parent, name):
            with subfolder(parent, name) as inside:
                for entry in names(inside):
                    yield from _changes(inside, entry, depth - 1)


def disk_use(parent: int) -> int | None:
    """Bytes on disk of what is in a folder; None if that is too much, too deep or locked."""
    use, left = 0, MAX_ENTRIES
    for size in _disk_uses(parent, MAX_MEASURED_DEPTH):
        left -= 1
        if size is None or left < 0:
            return None
        use += size
    return use


def _disk_uses(parent: int, depth: int) -> Iterator[int | None]:
    """Of each entry; None for what cannot be measured. What is gone meanwhile uses nothing."""
    if depth == 0:
        yield None
        return
    for name in names(parent):
        try:
            yield _status(parent, name).st_blocks * _BLOCK
            if is_folder(parent, name):
                with subfolder(parent, name) as inside:
                    yield from _disk_uses(inside, depth - 1)
        except FileNotFoundError:
            continue
        except OSError:
            yield None


def remove(parent: int, name: str) -> None:
    """Remove a name, and of a folder all that is in it; what cannot be removed stays."""
    with suppress(OSError):
        if not is_folder(parent, name):
            os.unlink(name, dir_fd=parent)
            return
        with subfolder(parent, name) as inside:
            clear(inside)
        os.rmdir(name, dir_fd=parent)


def clear(parent: int, keep: Container[str] = ()) -> None:
    """Remove what is in a folder, but for some names; what cannot be removed stays.

    Folders in it are moved up and emptied one after the other, so that any depth works.
    """
    left = MAX_ENTRIES
    while left > 0:
        before = left
        for name in names(parent):
            if name not in keep:
                left -= _flatten(parent, name, left)
            if left <= 0:
                return
        if left == before:
            return


def _flatten(parent: int, name: str, most: int) -> int:
    """Remove a file, or a folder whose folders are moved up before; return the number of changes.

    An entry is a change only if it is gone from where it was.
    """
    changes = 0
    with suppress(OSError):
        if not is_folder(parent, name):
            os.unlink(name, dir_fd=parent)
            return 1
        with subfolder(parent, name) as inside:
            for entry in islice(names(inside), most):
                with suppress(OSError):
                    if is_folder(inside, entry):
                        up = f".{secrets.token_hex(8)}"
                        os.rename(entry, up, src_dir_fd=inside, dst_dir_fd=parent)
                    else:
                        os.unlink(entry, dir_fd=inside)
                    changes += 1
        os.rmdir(name, dir_fd=parent)
        changes += 1
    return changes


def _status(parent: int, name: str) -> os.stat_result:
    return os.stat(name, dir_fd=parent, follow_symlinks=False)
