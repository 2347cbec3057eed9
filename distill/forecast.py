"""How long a distillation will take, and how much memory, from its first two steps."""

import resource
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from distill.distribution_matching import own_effort
from distill.registry import distiller

TRIAL_STEPS = 2


@dataclass(frozen=True)
class Forecast:
    """What a distillation will take.

    Parameters
    ----------
    seconds : float
        From start to end.
    memory : int
        Most bytes in use at once: by the whole process or, where it computes on one, on the GPU.
    """

    seconds: float
    memory: int


class _TrialEndsError(Exception):
    pass


def forecast(
    name: str, images: Tensor, labels: Tensor, *, device: torch.device, **arguments: Any
) -> Forecast:
    """Begin a distillation, and extrapolate after two steps.

    Preparing is taken to cost the same whatever the steps. Where the method has an argument `bank`,
    the networks that it draws first, two are drawn and the cost is counted for all; with None as
    its default, for as many as distribution matching draws.

    Parameters
    ----------
    name : str
        Of the distiller; not "auto", which has to be resolved first (`distill.auto.resolved`).
    images, labels, device, **arguments
        As for the distiller, without `progress`.
    """
    method = distiller(name)
    bank = signature(method).parameters.get("bank")
    few: dict[str, Any] = {} if bank is None else {"bank": TRIAL_STEPS}
    ends: list[float] = []
    total = 0

    def stop(step: int, steps: int, loss: float) -> None:
        nonlocal total
        total = steps
        ends.append(time.perf_counter())
        if step == TRIAL_STEPS:
            raise _TrialEndsError

    begin = time.perf_counter()
    with suppress(_TrialEndsError):
        method(images, labels, device=device, progress=stop, **few, **arguments)
    if len(ends) < TRIAL_STEPS:  # it is over already
        return Forecast(time.perf_counter() - begin, _peak(device))
    step = ends[1] - ends[0]
    preparation = max(0.0, ends[0] - begin - step)
    if bank is not None:
        formation, network = arguments.get("formation", 1), arguments.get("network")
        networks = bank.default or own_effort(images.shape, formation, network).bank
        preparation *= min(networks, total) / TRIAL_STEPS
    return Forecast(preparation + total * step, _peak(device))


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else 1024 * used
