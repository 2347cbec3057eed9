"""The device that a node's worker computes on, and claims, so that nodes take different GPUs."""

from __future__ import annotations

import fcntl
import os
import random
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from logging import INFO, WARNING
from pathlib import Path
from typing import IO

from flwr.common import log

from flwr_distill.node.gpus import describe_gpu, pytorch_needs, why_unusable

TURN_TIMEOUT = 10.0
"""Seconds to wait while other processes claim a GPU, which takes each a moment."""


class UnfitError(Exception):
    """The node's settings ask for what this machine cannot do."""


@dataclass(frozen=True)
class TakenDevice:
    """A device as apps see it, ``auto`` if the app chooses; the claim on a GPU lasts with it."""

    name: str
    claim: IO[bytes] | None = None


def take_device(setting: str, *, place: int = 0, folder: Path | None = None) -> TakenDevice:
    """Take the device that the setting asks for, and use it once.

    ``cuda:N`` is that GPU; ``cuda`` the GPU that fewest nodes of this user claim; ``auto`` the same
    if a GPU is usable, else the CPU, and open unless PyTorch is imported: an app without it needs
    no choice. Of equals, the GPU number `place` modulo their number is taken, so containers that
    cannot see each other's claims take different ones. `folder` is where claims are.

    UnfitError if the setting asks for a GPU and none is usable, or none can be claimed.
    """
    if setting == "cpu" or (setting == "auto" and "torch" not in sys.modules):
        return TakenDevice(setting)
    folder = folder or claims_folder()
    reasons: list[str] = []
    candidates = _candidates(setting, place)
    while candidates:
        try:
            chosen, lock = claim(list(candidates), folder)
        except OSError as error:
            raise UnfitError(
                f"device={setting}: {folder} cannot keep claims of GPUs ({error}): set TMPDIR to a "
                "folder of your own"
            ) from error
        number = candidates.pop(chosen)
        if not (reason := why_unusable(number)):
            log(INFO, "Device cuda:%d: %s", number, describe_gpu(number))
            return TakenDevice(f"cuda:{number}", lock)
        lock.close()
        reasons.append(f"cuda:{number}: {reason}")
    if setting != "auto":
        raise UnfitError(
            f"device={setting}: {'; '.join(reasons)}: update the driver, install a PyTorch for "
            "this GPU, or use device=cpu"
        )
    if reasons:
        log(WARNING, "device=auto takes the CPU: %s", "; ".join(reasons))
    else:
        log(INFO, "Device cpu: no GPU found")
    return TakenDevice("cpu")


def _candidates(setting: str, place: int) -> dict[str, int]:
    """Numbers of suitable GPUs, by their names for claims, in order of preference."""
    import torch

    count = torch.cuda.device_count()
    _, named, number = setting.partition(":")
    if setting != "auto" and int(number or 0) >= count:
        raise UnfitError(
            f"device={setting}: this machine has {count} CUDA devices; use device=auto or cpu "
            f"({pytorch_needs()})"
        )
    numbers = [int(number)] if named else [(place + n) % count for n in range(count)]
    return {_identity(number): number for number in numbers}


def _identity(number: int) -> str:
    """The same in every process, whichever GPUs it sees and however it numbers them."""
    import torch

    try:
        return str(torch.cuda.get_device_properties(number).uuid)
    except RuntimeError:  # CUDA does not work at all, as `why_unusable` will say
        return str(number)


def claims_folder() -> Path:
    """Folder of the claims of this user; a container has its own.

    Anyone may make the first folder in the system's temporary one before this user does.
    """
    return Path(tempfile.gettempdir()) / f"flwr-distill-{os.getuid()}" / "gpus"


def claim(gpus: Sequence[str], folder: Path) -> tuple[str, IO[bytes]]:
    """Claim the GPU that fewest processes of this user claim, the first of equals.

    `gpus` are names that are the same in every process, without dots. Returns one of them and a
    locked file: the claim lasts until it is closed, if only by the kernel as its process ends.
    OSError if the folder or its parent is a link, another user's or writable by others, or another
    process keeps its lock for over 10 s.
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
            if _is_locked(file):
                users[file.name.partition(".")[0]] += 1
            else:
                file.unlink()
        chosen = min(gpus, key=users.__getitem__)
        number, _ = tempfile.mkstemp(prefix=f"{chosen}.", suffix=".claim", dir=folder)
        claimed = os.fdopen(number, "wb")
        fcntl.flock(claimed, fcntl.LOCK_EX)
    return chosen, claimed


def _wait_for_turn(turn: IO[bytes]) -> None:
    deadline = time.monotonic() + TURN_TIMEOUT
    while True:
        try:
            fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{turn.name}: another process keeps it locked") from None
        time.sleep(random.uniform(0.02, 0.1))


def _is_locked(file: Path) -> bool:
    with file.open("rb") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
