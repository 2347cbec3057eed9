"""Files written whole or not at all, and files locked for one process."""

import fcntl
import os
import random
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a new path to write to; then sync that file, and move it to `target`.

    Whatever fails, `target` stays as it was, and no temporary file is left, so that a full disk
    recovers. The folder is synced too: otherwise a power cut could undo the move.

    Parameters
    ----------
    target : Path
        File to write or replace; its folder must exist.

    Raises
    ------
    OSError
        If the disk is full, or the folder cannot be written to.
    """
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        yield partial
        _sync(partial)
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync(target.parent)


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def lock_within(file: IO[Any], seconds: float) -> None:
    """Lock an open file for this process alone; TimeoutError if another keeps it that long."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{file.name}: another process keeps it locked") from None
        time.sleep(random.uniform(0.02, 0.1))
