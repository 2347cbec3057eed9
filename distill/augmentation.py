"""Differentiable Siamese augmentation (Zhao and Bilen 2021), without flips.

Each draw is one linear or affine map, for real and virtual images alike. Strengths are those of the
published DSA code. Flips would turn digits into other shapes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

_Draw = Callable[[], float]


@dataclass(frozen=True, eq=False)
class Augmentation:
    """A kind of map of images (n, C, H, W), with the parameters that were drawn for it."""

    kind: Callable[..., Tensor]
    parameters: tuple[Tensor, ...]

    def __call__(self, images: Tensor) -> Tensor:
        """Map images."""
        return self.kind(images, *self.parameters)

    def to(self, device: torch.device | str) -> "Augmentation":
        """Return the same map for images on `device`; waits for nothing."""
        moved = tuple(x.to(device, non_blocking=True) for x in self.parameters)
        return Augmentation(self.kind, moved)


def draw_augmentation(height: int, width: int, generator: torch.Generator) -> Augmentation:
    """Draw one augmentation for images of shape (n, C, height, width) on the CPU.

    Colour (brightness, saturation, contrast), shift, cutout, scale or rotation, equally likely.
    """

    def uniform() -> float:
        return float(torch.rand((), generator=generator))

    kinds = (_colour, _shift, _cutout, _scale, _rotation)
    return kinds[int(uniform() * len(kinds))](height, width, uniform)


def _colour(height: int, width: int, uniform: _Draw) -> Augmentation:
    brightness, saturation, contrast = uniform() - 0.5, 2 * uniform(), uniform() + 0.5
    return Augmentation(_coloured, (torch.tensor([brightness, saturation, contrast]),))


def _coloured(images: Tensor, strengths: Tensor) -> Tensor:
    brightness, saturation, contrast = strengths.unbind()
    images = images + brightness
    grey = images.mean(-3, keepdim=True)
    images = grey + saturation * (images - grey)
    level = images.mean((-3, -2, -1), keepdim=True)
    return level + contrast * (images - level)


def _shift(height: int, width: int, uniform: _Draw) -> Augmentation:
    def offset(size: int) -> int:
        reach = int(size * 0.125 + 0.5)
        return int(uniform() * (2 * reach + 1)) - reach

    return Augmentation(_Shifted(offset(height), offset(width)), ())


@dataclass(frozen=True)
class _Shifted:
    """The offsets are a part of the kind, because the host needs them."""

    down: int
    right: int

    def __call__(self, images: Tensor) -> Tensor:
        return functional.pad(images, (self.right, -self.right, self.down, -self.down))


def _cutout(height: int, width: int, uniform: _Draw) -> Augmentation:
    def span(size: int) -> slice:
        length = int(size * 0.5 + 0.5)
        begin = int(uniform() * (size + 1 - length % 2)) - length // 2
        return slice(max(begin, 0), min(begin + length, size))

    mask = torch.ones(height, width)
    mask[span(height), span(width)] = 0
    return Augmentation(_masked, (mask,))


def _masked(images: Tensor, mask: Tensor) -> Tensor:
    return images * mask


def _scale(height: int, width: int, uniform: _Draw) -> Augmentation:
    low, high = 1 / 1.2, 1.2
    x, y = low + (high - low) * uniform(), low + (high - low) * uniform()
    return _linear(height, width, [[x, 0.0], [0.0, y]])


def _rotation(height: int, width: int, uniform: _Draw) -> Augmentation:
    angle = math.radians(15) * (2 * uniform() - 1)
    cos, sin = math.cos(angle), math.sin(angle)
    return _linear(height, width, [[cos, -sin], [sin, cos]])


def _linear(height: int, width: int, matrix: list[list[float]]) -> Augmentation:
    """Sample each pixel from the place, (x, y) from the centre, that the matrix maps it to.

    In the matrix corner pixels are at 1, and in what is sampled the corners of the image: with
    ``align_corners=True`` PyTorch would leave a GPU's images to cuDNN's sampler.
    """
    shares = (width - 1) / width, (height - 1) / height
    rows = [[share * x for x in row] + [0.0] for share, row in zip(shares, matrix, strict=True)]
    return Augmentation(_sampled, (torch.tensor(rows),))


def _sampled(images: Tensor, matrix: Tensor) -> Tensor:
    theta = matrix.to(images.dtype).expand(len(images), 2, 3)
    grid = functional.affine_grid(theta, list(images.shape), align_corners=True)
    return functional.grid_sample(images, grid, align_corners=False)
