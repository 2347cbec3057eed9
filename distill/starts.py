"""Where virtual images start from: random draws that say little about the real ones."""

from collections.abc import Callable

import torch
from torch import Tensor

from distill.errors import DistillError


def class_stats(images: Tensor, noise: Tensor) -> Tensor:
    """Scale noise to one mean and one deviation over all pixels of the class."""
    return images.mean() + images.std(correction=0) * noise


def pixel_stats(images: Tensor, noise: Tensor) -> Tensor:
    """Scale noise to the class's mean and deviation at each pixel."""
    return images.mean(0) + images.std(0, correction=0) * noise


def standard_noise(images: Tensor, noise: Tensor) -> Tensor:
    """Leave the standard normal noise as it is; nothing of the images shows."""
    return noise


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
        the class; tells more about the data) or "noise" (nothing).
    images : Tensor
        Real images, float32 of shape (n, C, H, W).
    labels : Tensor
        int64 of shape (n,).
    per_class : int
        Virtual images for each class present.
    generator : torch.Generator
        Source of the noise, on the CPU.

    Returns
    -------
    tuple[Tensor, Tensor]
        float32 images of shape (classes present * per_class, C, H, W) and their int64 labels,
        sorted by class.

    Raises
    ------
    DistillError
        If `init` is no known start.
    """
    if init not in STARTS:
        raise DistillError(f"init {init!r} is unknown; choose one of {', '.join(STARTS)}")
    classes = torch.unique(labels)
    noise = torch.randn(len(classes), per_class, *images.shape[1:], generator=generator)
    drawn = [STARTS[init](images[labels == c], eps) for c, eps in zip(classes, noise, strict=True)]
    return torch.cat(drawn), classes.repeat_interleave(per_class)
