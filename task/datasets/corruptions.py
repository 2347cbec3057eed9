"""Corrupted copies of CIFAR-10, each a separate domain, after Hendrycks and Dietterich 2019.

The published files, CIFAR-10-C, have 19 corruptions of the test images. Without them, ten are made
of CIFAR-10, which torchvision, Pillow or a line of NumPy can do. Degrees are those of the published
code, and so are the pixels, but for edges of a blur and the zoom's interpolation. Only the files
have glass, defocus and motion blur, fog, frost, snow, spatter, elastic changes and saturation.
"""

import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from flwr_distill.task.datasets.types import (
    Dataset,
    DatasetError,
    DataSpec,
    RawSamples,
    check_raw_samples,
)

PREFIX = "cifar10-c/"
SEVERITIES = 5
FOLDER = "CIFAR-10-C"
"""Of the published files, as they are unpacked."""
TRAIN_SHARE = 0.6
"""Of the published images of each class, to train on: FedLGD has 6,000 of a corruption."""
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


def published_files(name: str, root: Path) -> list[Path]:
    """Files of a corruption in CIFAR-10-C, there or not: images and labels."""
    corruption = name.removeprefix(PREFIX).rpartition("-")[0]
    own = "jpeg_compression" if corruption == "jpeg" else corruption.replace("-", "_")
    return [root / FOLDER / f"{own}.npy", root / FOLDER / "labels.npy"]


def read_published(name: str, root: Path, spec: DataSpec) -> Dataset:
    """A corruption's images of one severity from the files of CIFAR-10-C.

    The first 60 % of each class's images are for training, the others for tests. These are the
    same in all corruptions, so that no image is trained on in one and tested in another.
    """
    severity = name.rpartition("-")[2]
    if severity not in map(str, range(1, SEVERITIES + 1)):
        raise DatasetError(
            "is unknown",
            where="dataset",
            value=name,
            remedy=f"use {PREFIX}NAME-SEVERITY with a severity of 1 to {SEVERITIES}",
        )
    images, labels = (_read_npy(file) for file in published_files(name, root))
    size = len(labels) // SEVERITIES
    own = slice((int(severity) - 1) * size, int(severity) * size)
    pixels = np.ascontiguousarray(np.moveaxis(images[own], 3, 1)) if images.ndim == 4 else images
    where = str(published_files(name, root)[0])
    whole = check_raw_samples(RawSamples(pixels, labels[own].astype(np.int64)), spec, where)
    is_train = first_of_each_class(whole.labels, TRAIN_SHARE)
    return Dataset(spec, *(whole.subset(np.flatnonzero(part)) for part in (is_train, ~is_train)))


def first_of_each_class(labels: NDArray[np.int64], share: float) -> NDArray[np.bool_]:
    """Which samples are among the first ones of their class, up to a share of it."""
    chosen = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        places = np.flatnonzero(labels == label)
        chosen[places[: round(share * len(places))]] = True
    return chosen


def _read_npy(file: Path) -> NDArray[np.uint8]:
    try:
        array: NDArray[np.uint8] = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DatasetError(f"cannot be read ({error})", where=file) from error
    return array


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
