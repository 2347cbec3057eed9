"""Corrupted copies of CIFAR-10, each a separate domain, after Hendrycks and Dietterich 2019.

Degrees are those of CIFAR-10-C's published code, and so are the pixels, but for edges of a blur and
the zoom's interpolation. Ten of its 19 corruptions are here, which torchvision, Pillow or a line of
NumPy can do. Missing are glass, defocus and motion blur, fog, frost, snow, spatter, elastic changes
and saturation.
"""

import zlib
from collections.abc import Callable, Mapping

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flwr_distill.task.datasets.types import Dataset, DatasetError, RawSamples

PREFIX = "cifar10-c/"
SEVERITIES = 5
_CHUNK = 1000
"""Images at a time, for memory."""

Corruption = Callable[[Tensor, float, np.random.Generator], Tensor]
"""Changes images (n, 3, H, W) in [0, 1] by a degree; the result may leave [0, 1]."""


def _gaussian_noise(images: Tensor, deviation: float, rng: np.random.Generator) -> Tensor:
    return images + deviation * _normal(images, rng)


def _shot_noise(images: Tensor, photons: float, rng: np.random.Generator) -> Tensor:
    return torch.from_numpy(rng.poisson(images.numpy() * photons) / photons)


def _impulse_noise(images: Tensor, share: float, rng: np.random.Generator) -> Tensor:
    drawn = torch.from_numpy(rng.random(images.shape, np.float32))
    return torch.where(drawn < share, (drawn < share / 2).float(), images)


def _speckle_noise(images: Tensor, deviation: float, rng: np.random.Generator) -> Tensor:
    return images + images * deviation * _normal(images, rng)


def _normal(images: Tensor, rng: np.random.Generator) -> Tensor:
    return torch.from_numpy(rng.standard_normal(images.shape, np.float32))


def _gaussian_blur(images: Tensor, deviation: float, rng: np.random.Generator) -> Tensor:
    from torchvision.transforms.v2 import functional

    width = 2 * round(4 * deviation) + 1
    blurred: Tensor = functional.gaussian_blur(images, [width, width], [deviation, deviation])
    return blurred


def _zoom_blur(images: Tensor, most: float, rng: np.random.Generator) -> Tensor:
    """Mean of an image and of its middle, enlarged up to `most` times."""
    from torchvision.transforms.v2 import functional

    size = list(images.shape[2:])
    zoomed = [
        functional.center_crop(functional.resize(images, [round(s * factor) for s in size]), size)
        for factor in np.arange(1, most, 0.01)
    ]
    return torch.stack([images, *zoomed]).mean(dim=0)


def _brightness(images: Tensor, more: float, rng: np.random.Generator) -> Tensor:
    """Raise HSV's value, the largest channel; hue and saturation stay."""
    value = images.amax(dim=1, keepdim=True)
    return torch.where(value > 0, images / value, 1) * (value + more).clamp(max=1)


def _contrast(images: Tensor, factor: float, rng: np.random.Generator) -> Tensor:
    mean = images.mean(dim=(2, 3), keepdim=True)
    return mean + factor * (images - mean)


def _pixelate(images: Tensor, share: float, rng: np.random.Generator) -> Tensor:
    """Fewer pixels, each the mean of an area, then as many as before."""
    height, width = images.shape[2:]
    box, small = Image.Resampling.BOX, (int(width * share), int(height * share))
    pixels = (images * 255).round().byte().movedim(1, 3).numpy()
    coarse = [
        np.asarray(Image.fromarray(image).resize(small, box).resize((width, height), box))
        for image in pixels
    ]
    return torch.from_numpy(np.stack(coarse)).movedim(3, 1) / 255


def _jpeg(images: Tensor, quality: float, rng: np.random.Generator) -> Tensor:
    from torchvision.transforms.v2 import functional

    pixels: Tensor = functional.jpeg((images * 255).round().to(torch.uint8), int(quality))
    return pixels / 255


_CORRUPTIONS: Mapping[str, tuple[Corruption, tuple[float, ...]]] = {
    "gaussian-noise": (_gaussian_noise, (0.04, 0.06, 0.08, 0.09, 0.10)),
    "shot-noise": (_shot_noise, (500, 250, 100, 75, 50)),
    "impulse-noise": (_impulse_noise, (0.01, 0.02, 0.03, 0.05, 0.07)),
    "speckle-noise": (_speckle_noise, (0.06, 0.1, 0.12, 0.16, 0.2)),
    "gaussian-blur": (_gaussian_blur, (0.4, 0.6, 0.7, 0.8, 1.0)),
    "zoom-blur": (_zoom_blur, (1.06, 1.11, 1.16, 1.21, 1.26)),
    "brightness": (_brightness, (0.05, 0.1, 0.15, 0.2, 0.3)),
    "contrast": (_contrast, (0.75, 0.5, 0.4, 0.3, 0.15)),
    "pixelate": (_pixelate, (0.95, 0.9, 0.85, 0.75, 0.65)),
    "jpeg": (_jpeg, (80, 65, 58, 50, 40)),
}
"""Each with its degrees, by severity from 1."""


def corrupted(clean: Dataset, name: str) -> Dataset:
    """The same colour images with a corruption, equal on every machine.

    Its `name`, ``cifar10-c/<corruption>-<severity>`` with a severity of 1 to 5, seeds the noise.
    """
    corruption, _, severity = name.removeprefix(PREFIX).rpartition("-")
    if corruption not in _CORRUPTIONS or severity not in map(str, range(1, SEVERITIES + 1)):
        raise DatasetError(
            "is unknown",
            where="dataset",
            value=name,
            remedy=f"use {PREFIX}NAME-SEVERITY with a severity of 1 to {SEVERITIES} and one of "
            + ", ".join(_CORRUPTIONS),
        )
    change, degrees = _CORRUPTIONS[corruption]
    parts = []
    for place, part in enumerate((clean.train, clean.test)):
        rng = np.random.default_rng([zlib.crc32(name.encode()), place])
        chunks = torch.split(torch.from_numpy(part.images), _CHUNK)
        changed = [change(chunk / 255, degrees[int(severity) - 1], rng) for chunk in chunks]
        pixels = (torch.cat(changed) * 255).round().clamp(0, 255).to(torch.uint8)
        parts.append(RawSamples(pixels.numpy(), part.labels))
    return Dataset(clean.spec, *parts)
