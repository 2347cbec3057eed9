"""Where virtual images start from: draws that say little about the real ones, or real ones."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from distill.errors import DistillError

logger = logging.getLogger("distill")


def class_stats(images: Tensor, noise: Tensor) -> Tensor:
    """Scale noise to one mean and one deviation over all pixels of the class."""
    return images.mean() + images.std(correction=0) * noise


def pixel_stats(images: Tensor, noise: Tensor) -> Tensor:
    """Scale noise to the class's mean and deviation at each pixel."""
    return images.mean(0) + images.std(0, correction=0) * noise


def standard_noise(images: Tensor, noise: Tensor) -> Tensor:
    """Leave the standard normal noise as it is; nothing of the images shows."""
    return noise


def real_images(images: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Copy random images of a class: each once while there are enough, then all over again.

    Parameters
    ----------
    images : Tensor
        All images of the class, (n, C, H, W), n >= 1.
    count : int
        Copies to make; where it is above n, an image comes again only after all others.
    generator : torch.Generator
        Source of the choice, on the CPU.

    Returns
    -------
    Tensor
        (count, C, H, W).
    """
    times = -(-count // len(images))
    orders = [torch.randperm(len(images), generator=generator) for _ in range(times)]
    return images[torch.cat(orders)[:count]]


REAL = "real"
STARTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "class-stats": class_stats,
    "pixel-stats": pixel_stats,
    "noise": standard_noise,
}


def start(
    init: str, images: Tensor, labels: Tensor, per_class: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw the virtual images a distiller starts from.

    Parameters
    ----------
    init : str
        "class-stats" (one mean and deviation a class), "pixel-stats" (those of each pixel of
        the class; tells more about the data), "noise" (nothing) or "real" (copies of random
        images of the class, which distillation moves little: they **leave the node nearly
        unchanged**; a warning is logged).
    images : Tensor
        Real images, float32 of shape (n, C, H, W).
    labels : Tensor
        int64 of shape (n,).
    per_class : int
        Virtual images for each class present.
    generator : torch.Generator
        Source of the noise or the choice, on the CPU.

    Returns
    -------
    tuple[Tensor, Tensor]
        float32 images of shape (classes present * per_class, C, H, W) and their int64 labels,
        sorted by class, on the CPU.

    Raises
    ------
    DistillError
        If `init` is no known start.
    """
    if init != REAL and init not in STARTS:
        choices = ", ".join([*STARTS, REAL])
        raise DistillError(f"init {init!r} is unknown; choose one of {choices}")
    classes = torch.unique(labels).cpu()
    by_class = [images[labels == c].cpu() for c in classes]
    if init == REAL:
        logger.warning("start 'real': virtual images begin as REAL IMAGES and stay much like them")
        drawn = [real_images(own, per_class, generator) for own in by_class]
    else:
        noise = torch.randn(len(classes), per_class, *images.shape[1:], generator=generator)
        drawn = [STARTS[init](own, eps) for own, eps in zip(by_class, noise, strict=True)]
    return torch.cat(drawn), classes.repeat_interleave(per_class)
