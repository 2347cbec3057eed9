"""The default distiller: takes the method that suits the classes a node holds."""

import logging

import torch
from torch import Tensor

from distill.registry import Progress, distiller, register
from distill.virtual_data import VirtualData

logger = logging.getLogger("distill")


def choose(held: int, num_classes: int) -> tuple[str, str]:
    """Choose a method by how many of the task's classes a node holds.

    What was measured stands in docs/benchmarks.md.

    Parameters
    ----------
    held : int
        Classes with at least one image.
    num_classes : int
        Classes of the task.

    Returns
    -------
    tuple[str, str]
        The method's name, "kip", "kip-negatives" or "dm", and the reason, for the log.
    """
    share = f"the node holds {held} of {num_classes} classes"
    if 2 * held > num_classes and held > 1:
        return "kip", f"{share}, enough for kernel regression to tell them apart"
    if held == 1:
        return "kip-negatives", f"{share}, which kernel regression can tell from no class"
    return "dm", f"{share}, and kernel regression would learn to tell only those apart"


@register("auto")
def distill_auto(
    images: Tensor,
    labels: Tensor,
    *,
    num_classes: int,
    per_class: int,
    init: str = "class-stats",
    steps: int | None = None,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> VirtualData:
    """Distil by the method that `choose` takes.

    The choice and its reason go to the logger "distill". Parameters, result and errors are
    those of every distiller, see `distill.registry.Distiller`; `steps=None` takes the default
    of the method chosen, whose name the result bears.
    """
    method, reason = choose(int(torch.unique(labels).numel()), num_classes)
    logger.info("distiller auto takes %s: %s", method, reason)
    return distiller(method)(
        images,
        labels,
        num_classes=num_classes,
        per_class=per_class,
        init=init,
        steps=steps,
        generator=generator,
        device=device,
        progress=progress,
    )
