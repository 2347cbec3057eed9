"""Files that outlast a power cut, whole or not at all, and locks on files."""

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replacing(target: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a new path to write to; then sync that file, and move it to `target`.

    Whatever fails, `target` stays as it was, and no temporary file is left, so that a full disk
    recovers. The folder is synced too: otherwise a power cut could undo the move.

    Parameters
    ----------
    target : Path
        File to write or replace; its folder must exist.
    durable : bool (default: True)
        Whether to sync. Without, a power cut may take it back: for what is written each round.

    Raises
    ------
    OSError
        If the disk is full, or the folder cannot be written to.
    """
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        yield partial
        if durable:
            _sync(partial)
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if durable:
        _sync(target.parent)


def try_lock(file: int | IO[str], how: int) -> bool:
    """Lock a file, as in ``fcntl.flock``; False if another process or object has locked it."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
