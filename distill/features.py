"""Random convolutional features: untrained ConvNets."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from flwr_distill.distill.errors import DistillError

MIN_SIDE = 4
MAX_MAP_SIDE = 8
"""Pixels a side of a block's features, where those of all depths are taken."""


def are_vectors(shape: Sequence[int]) -> bool:
    """Whether samples of shape (..., d, 1, 1) are vectors: rows of a table, or features."""
    return tuple(shape[-2:]) == (1, 1)


@dataclass(frozen=True, eq=False)
class RandomConvNet:
    """The ConvNet of the distillation papers with random weights, without its classifier.

    Blocks of 3x3 convolution (`filters`, (width, inputs, 3, 3) each), instance norm, ReLU and 2x2
    average pooling: the papers' three for up to 45 pixels a side, or fewer so that at least 2
    remain; for larger images as many as bring the shorter side closest to 4. With `all_depths` the
    features are those after each block, each scaled to add as much to a squared distance.
    """

    filters: tuple[Tensor, ...]
    all_depths: bool = False

    @classmethod
    def draw(
        cls,
        channels: int,
        side: int,
        width: int,
        generator: torch.Generator,
        device: torch.device | str = "cpu",
        *,
        all_depths: bool = False,
    ) -> "RandomConvNet":
        """Draw He-normal filters, `width` per block, for a shorter side of at least 4 pixels."""
        if side < MIN_SIDE:
            raise DistillError(
                f"must be at least {MIN_SIDE} for ConvNet features",
                where="pixels a side",
                value=side,
                remedy="use distiller 'kip'",
            )
        blocks = max(min(3, side.bit_length() - 2), round(math.log2(side / 4)))
        filters = []
        for inputs in [channels] + [width] * (blocks - 1):
            deviation = (2 / (9 * inputs)) ** 0.5
            noise = torch.randn(width, inputs, 3, 3, generator=generator)
            filters.append((deviation * noise).to(device))
        return cls(tuple(filters), all_depths)

    def __call__(self, images: Tensor) -> Tensor:
        """Features of images (n, C, H, W), flattened to (n, features)."""
        by_depth = []
        for weight in self.filters:
            images = functional.conv2d(images, weight.to(images.dtype), padding=1)
            images = functional.relu(functional.group_norm(images, len(weight)))
            images = halve(images)
            by_depth.append(images)
        if not self.all_depths:
            return images.flatten(1)
        maps = [_at_most(x, MAX_MAP_SIDE).flatten(1) for x in by_depth]
        return torch.cat([x / math.sqrt(x.shape[1]) for x in maps], 1)


def _at_most(images: Tensor, side: int) -> Tensor:
    """Images (n, C, H, W) averaged to at most that many pixels along each side."""
    height, width = images.shape[-2:]
    if max(height, width) <= side:
        return images
    return functional.adaptive_avg_pool2d(images, (min(height, side), min(width, side)))


def halve(images: Tensor) -> Tensor:
    """Average 2x2 pixels into one, as `avg_pool2d(images, 2)` does with (n, C, H, W).

    As a matrix product it is several times faster on a CPU, its gradient even more.
    """
    height, width = images.shape[2] // 2, images.shape[3] // 2
    row_pairs = images[..., : 2 * height, : 2 * width].reshape(*images.shape[:2], height, -1)
    average = torch.eye(width, dtype=images.dtype, device=images.device) / 4
    return row_pairs @ average.repeat_interleave(2, 0).repeat(2, 1)
