"""Unix sockets in folders with long names: a socket's path has 107 bytes at most."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_PATH = 107


@contextmanager
def short_path(socket: Path) -> Iterator[str]:
    """Yield a path of a socket that is short enough to bind or connect; valid in the block.

    Raises OSError if its folder cannot be entered.
    """
    if len(os.fsencode(socket)) <= MAX_PATH:
        yield str(socket)
        return
    folder = os.open(socket.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{socket.name}"
    finally:
        os.close(folder)
