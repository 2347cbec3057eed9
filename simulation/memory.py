"""A folder in memory for the models of a simulation."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

SHARED_MEMORY, MIN_ROOM = Path("/dev/shm"), 2**30
"""Where models lie if it has so many bytes free (a container's often has 64 MB), else on disk."""
PREFIX = "flwr-distill-simulation-"


@contextmanager
def memory_folder() -> Iterator[Path]:
    """Make a folder, in memory if there is room, and delete it after the block.

    Folders of servers that were killed are deleted first: they would take memory until the machine
    restarts, or disk. A server that runs has its folder locked.
    """
    parent = _shared_memory()
    while True:
        with TemporaryDirectory(prefix=PREFIX, dir=parent) as name, _locked(name) as is_there:
            if is_there:  # else another server found it before it was locked
                yield Path(name)
                return


def _shared_memory() -> Path | None:
    for parent in (SHARED_MEMORY, Path(gettempdir())):
        for left in parent.glob(f"{PREFIX}*"):
            with suppress(OSError), _locked(left, fcntl.LOCK_NB) as is_there:
                if is_there:
                    shutil.rmtree(left)
    is_writable = os.access(SHARED_MEMORY, os.W_OK)
    has_room = is_writable and shutil.disk_usage(SHARED_MEMORY).free >= MIN_ROOM
    return SHARED_MEMORY if has_room else None


@contextmanager
def _locked(folder: str | Path, how: int = 0) -> Iterator[bool]:
    """Lock a folder within the block; gives whether it was still there then."""
    number = None
    with suppress(FileNotFoundError):
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    if number is None:
        yield False
        return
    try:
        fcntl.flock(number, fcntl.LOCK_EX | how)
        yield os.path.exists(folder)
    finally:
        os.close(number)
