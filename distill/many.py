"""Distil the data of several nodes in one call."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flwr_distill.distill.auto import resolved
from flwr_distill.distill.distribution_matching import Network
from flwr_distill.distill.kip import DESCENT, VARIANTS, Descent, distill_kip_many
from flwr_distill.distill.registry import distiller, formation_arguments
from flwr_distill.distill.virtual_data import VirtualData


def distill_many(
    name: str,
    sets: Sequence[tuple[Tensor, Tensor]],
    *,
    num_classes: int,
    generators: Sequence[torch.Generator],
    formation: int = 1,
    network: Network | None = None,
    descent: Descent = DESCENT,
    **options: Any,
) -> list[VirtualData]:
    """Distil each set (images and labels of a node) as the distiller would alone.

    KIP processes sets of one size together (`distill.kip.distill_kip_many`), many times faster for
    small sets; `descent` is for it. `network` is for distillers that take one
    (`distill.own_network`).
    """
    names = [resolved(name, images, labels, num_classes) for images, labels in sets]
    results: dict[int, VirtualData] = {}
    for method in dict.fromkeys(names):
        places = [place for place, own in enumerate(names) if own == method]
        arguments = {"num_classes": num_classes, **options}
        arguments |= formation_arguments(method, formation)
        arguments |= {"network": network} if network is not None else {}
        if method in VARIANTS:
            virtual = distill_kip_many(
                [sets[place] for place in places],
                generators=[generators[place] for place in places],
                descent=descent,
                **VARIANTS[method],
                **arguments,
            )
        else:
            virtual = [
                distiller(method)(*sets[place], generator=generators[place], **arguments)
                for place in places
            ]
        results.update(zip(places, virtual, strict=True))
    return [results[place] for place in range(len(sets))]
