"""The device that a node's worker computes on."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from logging import INFO, WARNING
from pathlib import Path
from typing import IO

from flwr.common import log

from flwr_distill.node.gpu_claims import claim, claims_folder
from flwr_distill.node.gpus import describe_gpu, pytorch_needs, why_unusable


class UnfitError(Exception):
    """The node's settings ask for what this machine cannot do."""


@dataclass(frozen=True)
class TakenDevice:
    """A device's name as apps see it, and the claim on the GPU: other nodes see it while it lives.

    The name is ``auto`` where the choice is left to the app.
    """

    name: str
    claim: IO[bytes] | None = None


def take_device(setting: str, *, place: int = 0, folder: Path | None = None) -> TakenDevice:
    """Take the device that the setting asks for, and use it once.

    Parameters
    ----------
    setting : str
        ``cpu``; ``cuda:N``, that GPU; ``cuda``, the GPU that fewest nodes of this user hold;
        ``auto``, the same if there is a GPU that can be used, else the CPU. ``auto`` stays open
        unless PyTorch is imported: for an app without it, nothing is to be chosen.
    place : int (default: 0)
        Of equals, the GPU of this number modulo their number is taken. So containers that cannot
        see each other's claims take different ones.
    folder : Path | None (default: None)
        Where claims are. None: `claims_folder`.

    Raises
    ------
    UnfitError
        If the setting asks for a GPU and there is none that can be used, or none can be claimed.
    """
    if setting == "cpu" or (setting == "auto" and "torch" not in sys.modules):
        return TakenDevice(setting)
    folder = folder or claims_folder()
    reasons: list[str] = []
    candidates = _candidates(setting, place)
    while candidates:
        try:
            chosen, held = claim(list(candidates), folder)
        except OSError as error:
            raise UnfitError(
                f"device={setting}: {folder} cannot hold what tells nodes which GPUs are taken "
                f"({error}): set TMPDIR to a folder of your own"
            ) from error
        number = candidates.pop(chosen)
        if not (reason := why_unusable(number)):
            log(INFO, "Device cuda:%d: %s", number, describe_gpu(number))
            return TakenDevice(f"cuda:{number}", held)
        held.close()
        reasons.append(f"cuda:{number}: {reason}")
    if setting != "auto":
        raise UnfitError(
            f"device={setting}: {'; '.join(reasons)}: update the driver, install a PyTorch for "
            "this GPU, or use device=cpu"
        )
    if reasons:
        log(WARNING, "device=auto takes the CPU: %s", "; ".join(reasons))
    else:
        log(INFO, "Device cpu: no GPU is there")
    return TakenDevice("cpu")


def _candidates(setting: str, place: int) -> dict[str, int]:
    """Numbers of the GPUs that will do, by their names for claims, in order of preference."""
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
