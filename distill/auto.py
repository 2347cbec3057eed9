"""The default distiller: takes the method that suits the classes a node holds."""

import logging

import torch
from torch import Tensor

from distill.distribution_matching import distill_dm
from distill.kip import distill_kip
from distill.registry import Distiller, Progress, register
from distill.virtual_data import VirtualData

logger = logging.getLogger("distill")


def choose(held: int, num_classes: int) -> tuple[str, str]:
    """Choose between "kip" and "dm" by how many of the task's classes a node holds.

    Parameters
    ----------
    held : int
        Classes with at least one image.
    num_classes : int
        Classes of the task.

    Returns
    -------
    tuple[str, str]
        The method's name and the reason, for the log.
    """
    share = f"the node holds {held} of {num_classes} classes"
    if held > 1 and 2 * held > num_classes:
        return "kip", f"{share}, enough for kernel regression to tell them apart"
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
    """Distil by KIP where more than half of the classes are present, else by DM.

    The choice and its reason go to the logger "distill". Parameters, result and errors are
    those of every distiller, see `distill.registry.Distiller`; `steps=None` takes the default
    of the method chosen, whose name the result bears.
    """
    method, reason = choose(int(torch.unique(labels).numel()), num_classes)
    logger.info("distiller auto takes %s: %s", method, reason)
    chosen: Distiller = distill_kip if method == "kip" else distill_dm
    return chosen(
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
