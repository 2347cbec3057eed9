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

from flwr_distill.distill.distribution_matching import own_effort
from flwr_distill.distill.registry import distiller

TRIAL_STEPS = 2


@dataclass(frozen=True)
class Forecast:
    """Seconds from start to end, and most bytes in use at once (on the GPU, if it computes)."""

    seconds: float
    memory: int


class _TrialEndsError(Exception):
    pass


def forecast(
    name: str, images: Tensor, labels: Tensor, *, device: torch.device, **arguments: Any
) -> Forecast:
    """Begin a distillation a few times, and extrapolate from two steps; a first trial warms up.

    Takes the arguments of the distiller `name` (not "auto", see `distill.auto.resolved`). Where it
    has an argument `bank`, the cost of one more of these networks is counted for all.
    """
    method = distiller(name)
    bank = signature(method).parameters.get("bank")
    total = 0

    def trial(**few: Any) -> tuple[float, float]:
        """Seconds of preparing and of a step."""
        ends = [time.perf_counter()]

        def stop(step: int, steps: int, loss: float) -> None:
            nonlocal total
            total = steps
            ends.append(time.perf_counter())
            if step == TRIAL_STEPS:
                raise _TrialEndsError

        with suppress(_TrialEndsError):
            method(images, labels, device=device, progress=stop, **few, **arguments)
        step = ends[-1] - ends[-2]
        return max(0.0, ends[1] - ends[0] - step), step

    if bank is None:
        trial()
        preparation, step = trial()
        return Forecast(preparation + total * step, _peak(device))
    trial(bank=1)
    (one, _), (two, step) = trial(bank=1), trial(bank=2)
    formation, network = arguments.get("formation", 1), arguments.get("network")
    networks = min(bank.default or own_effort(images.shape, formation, network).bank, total)
    preparation = one + (networks - 1) * max(0.0, two - one)
    return Forecast(preparation + total * step, _peak(device))


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else 1024 * used
