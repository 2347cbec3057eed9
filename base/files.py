"""Writes files that outlast a power cut: whole, or not at all."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
