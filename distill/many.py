"""Several nodes' data distilled in one call."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distill.auto import choose
from distill.kip import VARIANTS, distill_kip_many
from distill.registry import Progress, distiller
from distill.virtual_data import VirtualData


def distill_many(
    name: str,
    sets: Sequence[tuple[Tensor, Tensor]],
    *,
    num_classes: int,
    per_class: int,
    init: str = "class-stats",
    steps: int | None = None,
    generators: Sequence[torch.Generator],
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> list[VirtualData]:
    """Distil each of several sets, as the distiller would by itself.

    KIP takes sets of one size in shared steps (`distill.kip.distill_kip_many`), which is many
    times faster for small ones; other distillers take one set after another.

    Parameters
    ----------
    name : str
        Of a distiller; see `distill.registry.distiller`.
    sets : Sequence[tuple[Tensor, Tensor]]
        Images and labels of each node; images all of one shape (C, H, W).
    generators : Sequence[torch.Generator]
        One for each set.
    num_classes, per_class, init, steps, device, progress
        As every distiller's.

    Returns
    -------
    list[VirtualData]
        In the order of `sets`.

    Raises
    ------
    DistillError
        If an argument is unusable.
    """
    names = [_resolved(name, labels, num_classes) for _, labels in sets]
    results: dict[int, VirtualData] = {}
    for method in dict.fromkeys(names):
        places = [place for place, own in enumerate(names) if own == method]
        asked: dict[str, Any] = {
            "num_classes": num_classes,
            "per_class": per_class,
            "init": init,
            "steps": steps,
            "device": device,
            "progress": progress,
        }
        if method in VARIANTS:
            made = distill_kip_many(
                [sets[place] for place in places],
                generators=[generators[place] for place in places],
                **VARIANTS[method],
                **asked,
            )
        else:
            made = [
                distiller(method)(*sets[place], generator=generators[place], **asked)
                for place in places
            ]
        results.update(zip(places, made, strict=True))
    return [results[place] for place in range(len(sets))]


def _resolved(name: str, labels: Tensor, num_classes: int) -> str:
    """Name what "auto" takes for a set; other names stand for themselves."""
    return choose(len(torch.unique(labels)), num_classes)[0] if name == "auto" else name
