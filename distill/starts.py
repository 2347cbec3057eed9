"""Initial virtual images: noise scaled by statistics of the real ones, or copies of real ones."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from flwr_distill.distill.errors import DistillError
from flwr_distill.distill.formation import Formation

logger = logging.getLogger("distill")


def class_stats(images: Tensor, noise: Tensor) -> Tensor:
    """Scale noise to one mean and one deviation over all pixels of the class."""
    return images.mean() + images.std(correction=0) * noise


def pixel_stats(images: Tensor, noise: Tensor) -> Tensor:
    """Scale noise to the class's mean and deviation at each pixel."""
    return images.mean(0) + images.std(0, correction=0) * noise


def standard_noise(images: Tensor, noise: Tensor) -> Tensor:
    """Return the standard normal noise unchanged; reveals nothing about the images."""
    return noise


def real_images(images: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Copy `count` random images of a class (n, C, H, W); one repeats only after all others."""
    times = -(-count // len(images))
    orders = [torch.randperm(len(images), generator=generator) for _ in range(times)]
    return images[torch.cat(orders)[:count]]


def smoothed(noise: Tensor) -> Tensor:
    """White noise (..., H, W) filtered so that its amplitude falls as 1 / frequency.

    Photographs have such a spectrum (Field 1987), so it says nothing about the images at hand.
    """
    height, width = noise.shape[-2:]
    frequency = torch.hypot(torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width))
    amplitude = 1 / frequency.clamp_min(1 / max(height, width))
    smooth: Tensor = torch.fft.irfft2(torch.fft.rfft2(noise) * amplitude, s=(height, width))
    return smooth


REAL = "real"
STARTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "class-stats": class_stats,
    "pixel-stats": pixel_stats,
    "noise": standard_noise,
}


def start(
    init: str,
    images: Tensor,
    labels: Tensor,
    per_class: int,
    generator: torch.Generator,
    formation: int = 1,
    *,
    smooth: bool = False,
) -> tuple[Tensor, Tensor]:
    """Initialise virtual images: float32 (classes present * per_class, C, H, W), and int64 labels.

    They are on the CPU, sorted by class. Small images start like large ones, from real images that
    were shrunk first: their statistics say no more of these than the full-sized ones'.

    Parameters
    ----------
    init : str
        "class-stats" (one mean and deviation per class), "pixel-stats" (per pixel of the class;
        reveals more about the data), "noise" (reveals nothing) or "real" (copies of random images,
        which **leave the node almost unchanged**, since distillation changes them little).
    images, labels : Tensor
        Real images, float32 (n, C, H, W), and int64 (n,).
    formation : int (default: 1)
        Small images along each side, see `distill.formation`.
    smooth : bool (default: False)
        Whether noise is as smooth as photographs are, instead of independent from pixel to pixel.

    Raises
    ------
    DistillError
        If `init` is unknown.
    """
    if init != REAL and init not in STARTS:
        choices = ", ".join([*STARTS, REAL])
        raise DistillError("unknown", where="init", value=init, remedy=f"choose one of {choices}")
    classes = torch.unique(labels).cpu()
    by_class = (images[labels == c].cpu() for c in classes)  # one copy at a time
    tiles = Formation.of(formation, images.shape)
    small = per_class * formation**2
    if init == REAL:
        logger.warning("start 'real': virtual images start as REAL IMAGES and stay similar to them")
        initial_images = [tiles.pack(real_images(own, small, generator)) for own in by_class]
    else:
        count = small if smooth else per_class
        noise = torch.randn(len(classes), count, *images.shape[1:], generator=generator)
        if smooth:
            noise = torch.stack([tiles.pack(of_class) for of_class in smoothed(noise)])
            noise = noise / noise.square().mean((-2, -1), keepdim=True).sqrt()
        initial_images = [
            STARTS[init](tiles.tiled(own), eps) for own, eps in zip(by_class, noise, strict=True)
        ]
    return torch.cat(initial_images), classes.repeat_interleave(per_class)
