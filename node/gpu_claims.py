"""Which GPUs the processes of a user hold on a machine, so that the next one takes another.

A claim is a locked file. The kernel unlocks it when its process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import random
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import IO

TURN_WITHIN = 10.0
"""Seconds to wait while other processes claim a GPU, which takes each a moment."""


def claims_folder() -> Path:
    """Folder of the claims of this user; a container has its own.

    Anyone may make the first folder in the system's temporary one before this user does.
    """
    return Path(tempfile.gettempdir()) / f"flwr-distill-{os.getuid()}" / "gpus"


def claim(gpus: Sequence[str], folder: Path) -> tuple[str, IO[bytes]]:
    """Claim the GPU that fewest processes hold, the first of equals.

    Parameters
    ----------
    gpus : Sequence[str]
        Names that are the same in every process, without dots.
    folder : Path
        As from `claims_folder`.

    Returns
    -------
    tuple[str, IO[bytes]]
        The GPU's name, and a file: the claim lasts until it is closed.

    Raises
    ------
    OSError
        If the folder or the one that it is in is a link, another user's or open to other users, or
        another process holds its lock for over 10 s.
    """
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(f"{path} is not a folder of this user")
        if status.st_mode & 0o022:
            raise PermissionError(f"other users can write in {path}")
    with (folder / "lock").open("ab") as turn:
        _wait_for_turn(turn)
        users: Counter[str] = Counter()
        for file in folder.glob("*.claim"):
            if _is_held(file):
                users[file.name.partition(".")[0]] += 1
            else:
                file.unlink()
        chosen = min(gpus, key=users.__getitem__)
        number, _ = tempfile.mkstemp(prefix=f"{chosen}.", suffix=".claim", dir=folder)
        held = os.fdopen(number, "wb")
        fcntl.flock(held, fcntl.LOCK_EX)
    return chosen, held


def _wait_for_turn(turn: IO[bytes]) -> None:
    deadline = time.monotonic() + TURN_WITHIN
    while True:
        try:
            fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{turn.name}: another process keeps it locked") from None
        time.sleep(random.uniform(0.02, 0.1))


def _is_held(file: Path) -> bool:
    with file.open("rb") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
