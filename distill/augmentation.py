"""Differentiable Siamese augmentation (Zhao and Bilen 2021), without flips.

Each draw is one linear or affine map, applied to both real and virtual images and differentiable by
its input. Strengths are those of the published DSA code. No flips: they turn digits into other
shapes.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

Augmentation = Callable[[Tensor], Tensor]
_Draw = Callable[[], float]


def draw_augmentation(height: int, width: int, generator: torch.Generator) -> Augmentation:
    """Draw one augmentation for images of shape (n, C, height, width).

    Colour (brightness, saturation, contrast), shift, cutout, scale or rotation, with equal
    probability. The generator must be on the CPU.
    """

    def uniform() -> float:
        return float(torch.rand((), generator=generator))

    kinds = (_colour, _shift, _cutout, _scale, _rotation)
    return kinds[int(uniform() * len(kinds))](height, width, uniform)


def _colour(height: int, width: int, uniform: _Draw) -> Augmentation:
    brightness, saturation, contrast = uniform() - 0.5, 2 * uniform(), uniform() + 0.5

    def apply(images: Tensor) -> Tensor:
        images = images + brightness
        grey = images.mean(1, keepdim=True)
        images = grey + saturation * (images - grey)
        level = images.mean((1, 2, 3), keepdim=True)
        return level + contrast * (images - level)

    return apply


def _shift(height: int, width: int, uniform: _Draw) -> Augmentation:
    def offset(size: int) -> int:
        reach = int(size * 0.125 + 0.5)
        return int(uniform() * (2 * reach + 1)) - reach

    down, right = offset(height), offset(width)
    return lambda images: functional.pad(images, (right, -right, down, -down))


def _cutout(height: int, width: int, uniform: _Draw) -> Augmentation:
    def span(size: int) -> slice:
        length = int(size * 0.5 + 0.5)
        begin = int(uniform() * (size + 1 - length % 2)) - length // 2
        return slice(max(begin, 0), min(begin + length, size))

    mask = torch.ones(height, width)
    mask[span(height), span(width)] = 0
    return lambda images: images * mask.to(images.device)


def _scale(height: int, width: int, uniform: _Draw) -> Augmentation:
    low, high = 1 / 1.2, 1.2
    x, y = low + (high - low) * uniform(), low + (high - low) * uniform()
    return _affine(torch.tensor([[x, 0.0, 0.0], [0.0, y, 0.0]]))


def _rotation(height: int, width: int, uniform: _Draw) -> Augmentation:
    angle = math.radians(15) * (2 * uniform() - 1)
    cos, sin = math.cos(angle), math.sin(angle)
    return _affine(torch.tensor([[cos, -sin, 0.0], [sin, cos, 0.0]]))


def _affine(matrix: Tensor) -> Augmentation:
    def apply(images: Tensor) -> Tensor:
        theta = matrix.to(images).expand(len(images), 2, 3)
        grid = functional.affine_grid(theta, list(images.shape), align_corners=True)
        return functional.grid_sample(images, grid, align_corners=True)

    return apply
