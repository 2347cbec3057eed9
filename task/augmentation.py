"""Random changes of training images, drawn anew for each image and each time it is shown.

All geometry of an image is one affine map, and a minibatch is resampled in one call. Numbers are
drawn on the CPU, so that a GPU trains on the same images, and nothing waits for it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from flwr_distill.task.datasets.types import DataSpec
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.settings import CHANGES, Change

SHIFT = 0.1
"""Of a side; up and down, left and right."""
SCALE = 0.12
ROTATE = math.radians(12)
SHEAR = 0.15
BRIGHTNESS, SATURATION, CONTRAST = 0.5, 1.0, 0.5
"""Brightness is in units of normalised pixels. As in DSA (Zhao and Bilen 2021)."""
CUTOUT = 0.25
"""Of a side; as published for CIFAR-100 (DeVries and Taylor 2017)."""

GEOMETRY: tuple[Change, ...] = ("shift", "scale", "rotate", "shear", "flip")
NUMBERS: Mapping[Change, int] = {
    "shift": 2,
    "scale": 2,
    "rotate": 1,
    "shear": 1,
    "flip": 1,
    "colour": 3,
    "cutout": 2,
}
"""Random numbers that a change of an image takes."""


def chosen_changes(augment: str, spec: DataSpec) -> tuple[Change, ...]:
    """The changes that a setting ``train.augment`` stands for, with data of this kind.

    ``auto`` are those that `spec` says are safe. Raises SettingsError if changes are named, and the
    data are not images.
    """
    if augment == "none":
        return ()
    if augment == "auto":
        return spec.safe_changes if spec.kind == "image" else ()
    if spec.kind != "image":
        raise SettingsError(
            f"{spec.name} is a {spec.kind} data set, and only images can be changed so",
            where="train.augment",
            value=augment,
            remedy="set it to none or auto",
        )
    names = [name.strip() for name in augment.split(",")]
    return tuple(change for change in CHANGES if change in names)


@dataclass(frozen=True)
class Augment:
    """At least one change, and a generator on the CPU for their random numbers."""

    changes: tuple[Change, ...]
    generator: torch.Generator

    def draw(self, count: int, device: torch.device | str = "cpu") -> Tensor:
        """Numbers for the changes of `count` images, on the device; waits for nothing."""
        size = sum(NUMBERS[change] for change in self.changes)
        numbers = 2 * torch.rand(count, size, generator=self.generator) - 1
        if torch.device(device).type == "cuda":
            numbers = numbers.pin_memory()
        return numbers.to(device, non_blocking=True)


def augmented(images: Tensor, changes: tuple[Change, ...], numbers: Tensor) -> Tensor:
    """Change each image by its own random numbers.

    Pixels from outside of an image repeat its edge, which is the background of a digit.

    Parameters
    ----------
    images : Tensor
        float32 (n, C, H, W), normalised.
    changes : tuple[str, ...]
        ``shift`` (by up to a tenth of a side, as random crops with padding do), ``scale`` (each
        side by up to 12 %), ``rotate`` (by up to 12 degrees), ``shear`` (up to 0.15 sideways for
        each pixel down), ``flip`` (left and right, every second image), ``colour`` (brightness,
        saturation and contrast) and ``cutout`` (a rectangle of a quarter of each side becomes 0,
        the data set's mean).
    numbers : Tensor
        From `Augment.draw`, for the same changes, on the device of the images.
    """
    sizes = [NUMBERS[change] for change in changes]
    drawn = dict(zip(changes, torch.split(numbers, sizes, dim=1), strict=True))
    if any(change in drawn for change in GEOMETRY):
        images = _resampled(images, drawn)
    if "colour" in drawn:
        images = _coloured(images, drawn["colour"])
    if "cutout" in drawn:
        images = _cut_out(images, drawn["cutout"])
    return images


def _resampled(images: Tensor, drawn: Mapping[Change, Tensor]) -> Tensor:
    """Images by one affine map each, from places in the result to places in the image.

    Places run from -1 to 1 over each side, so a rotation knows the ratio of the sides.
    """
    still = images.new_zeros(len(images), 2)
    ratio = images.shape[-1] / images.shape[-2]
    right, down = (2 * SHIFT * drawn.get("shift", still)).unbind(1)
    x, y = (1 + SCALE * drawn.get("scale", still)).unbind(1)
    angle = ROTATE * drawn.get("rotate", still)[:, 0]
    skew = SHEAR * drawn.get("shear", still)[:, 0]
    mirror = torch.where(drawn.get("flip", still)[:, 0] < 0, -1.0, 1.0)
    cos, sin = angle.cos(), angle.sin()
    top = mirror * torch.stack([x * cos, (skew - x * sin) / ratio, right])
    bottom = torch.stack([y * sin * ratio, y * cos, down])
    maps = torch.stack([top, bottom]).permute(2, 0, 1)
    grid = _places(maps, *images.shape[-2:])
    return functional.grid_sample(images, grid, padding_mode="border", align_corners=False)


def _places(maps: Tensor, height: int, width: int) -> Tensor:
    """As `torch.nn.functional.affine_grid` of maps (n, 2, 3), in a third of its time on a CPU."""
    along, across = (
        (2 * torch.arange(side, device=maps.device) + 1) / side - 1 for side in (width, height)
    )
    by_x, by_y, moved = maps[..., None, None].unbind(2)
    return (by_x * along + (by_y * across[:, None] + moved)).permute(0, 2, 3, 1)


def _coloured(images: Tensor, numbers: Tensor) -> Tensor:
    brightness, saturation, contrast = numbers[..., None, None, None].unbind(1)
    images = images + BRIGHTNESS * brightness
    grey = images.mean(1, keepdim=True)
    images = grey + (1 + SATURATION * saturation) * (images - grey)
    level = images.mean((1, 2, 3), keepdim=True)
    return level + (1 + CONTRAST * contrast) * (images - level)


def _cut_out(images: Tensor, numbers: Tensor) -> Tensor:
    inside = [
        (torch.linspace(-1, 1, side, device=images.device) - centre[:, None]).abs() < CUTOUT
        for side, centre in zip(images.shape[-2:], numbers.T, strict=True)
    ]
    return images.masked_fill((inside[0][:, :, None] & inside[1][:, None])[:, None], 0.0)
