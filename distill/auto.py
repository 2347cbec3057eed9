"""The default distiller: chooses the method by a node's images and the classes that it has."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flwr_distill.distill.features import are_vectors
from flwr_distill.distill.formation import best_formation
from flwr_distill.distill.registry import distiller, register
from flwr_distill.distill.virtual_data import VirtualData

logger = logging.getLogger("distill")


def choose(present: int, num_classes: int, shape: Sequence[int]) -> tuple[str, str]:
    """Method ("kip", "kip-negatives" or "dm") and the reason, for the log.

    By the classes that a node has, those of the task, and the images' shape (..., H, W). See
    docs/archive/benchmarks.md for why.
    """
    share = f"the node has {present} of {num_classes} classes"
    if best_formation(shape) > 1:
        return "dm", f"{share}, and a virtual image has room for several"
    if 2 * present > num_classes and present > 1:
        return "kip", f"{share}, enough for kernel regression to tell them apart"
    if are_vectors(shape):
        return "dm", f"{share}, and of vectors there are none of no class to tell them from"
    if present == 1:
        return "kip-negatives", f"{share}, which kernel regression can tell from images of no class"
    return "dm", f"{share}, and kernel regression would only learn to tell those apart"


def resolved(name: str, images: Tensor, labels: Tensor, num_classes: int) -> str:
    """Name of the method that distils a node's data: that of `choose` in place of "auto"."""
    present = len(torch.unique(labels))
    return choose(present, num_classes, images.shape)[0] if name == "auto" else name


@register("auto")
def distill_auto(
    images: Tensor, labels: Tensor, *, num_classes: int, formation: int = 1, **options: Any
) -> VirtualData:
    """Distil by the method from `choose`; see `distill.registry.Distiller`.

    Logs the choice and its reason. The result's `method` is the chosen one.
    """
    method, reason = choose(int(torch.unique(labels).numel()), num_classes, images.shape)
    logger.info("distiller auto takes %s: %s", method, reason)
    return distiller(method)(
        images, labels, num_classes=num_classes, formation=formation, **options
    )
