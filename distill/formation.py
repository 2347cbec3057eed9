"""Multi-formation (Kim et al. 2022): an image of several smaller ones, enlarged where used."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from flwr_distill.distill.errors import DistillError

MAX_FORMATION = 4
"""Largest formation: images are trained on as 16 times as many."""
MIN_SIDE = 16
"""Of images that distribution matching packs where it may choose; see docs/design.md."""


def largest_formation(shape: Sequence[int]) -> int:
    """The largest formation of images of shape (..., H, W): tiles have a pixel at least."""
    return min(MAX_FORMATION, *shape[-2:])


def best_formation(shape: Sequence[int]) -> int:
    """The most that a method chooses by itself, for images of shape (..., H, W)."""
    return 2 if min(shape[-2:]) >= MIN_SIDE else 1


@dataclass(frozen=True, eq=False)
class Formation:
    """Packs `factor` x `factor` images into the pixels of one, and enlarges them again.

    Both are linear maps of rows and columns, so a gradient passes back by their transpose. Where
    `factor` does not divide a side, tiles differ by one pixel. `enlarge` are the matrices (factor *
    H, H) and (factor * W, W), bilinear; `shrink` (H, factor * H) and (W, factor * W), averages.
    """

    factor: int
    enlarge: tuple[Tensor, Tensor]
    shrink: tuple[Tensor, Tensor]

    @classmethod
    def of(
        cls, factor: int, shape: Sequence[int], device: torch.device | str = "cpu"
    ) -> "Formation":
        """Formation of images of shape (..., H, W); DistillError if `factor` is out of range."""
        most = largest_formation(shape)
        if not 1 <= factor <= most:
            problem = f"must be from 1 to {most} for images of {shape[-2]} x {shape[-1]}"
            raise DistillError(problem, where="formation", value=factor)
        enlarge_rows, shrink_rows = _resizing(shape[-2], factor)
        enlarge_columns, shrink_columns = _resizing(shape[-1], factor)
        return cls(
            factor,
            (enlarge_rows.to(device), enlarge_columns.to(device)),
            (shrink_rows.to(device), shrink_columns.to(device)),
        )

    def decode(self, images: Tensor) -> Tensor:
        """Enlarge the tiles of images (..., n, C, H, W) to (..., n * factor^2, C, H, W)."""
        return images if self.factor == 1 else self._cut(_mapped(images, *self.enlarge))

    def pullback(self, gradient: Tensor) -> Tensor:
        """Gradient by images from that by the decoded ones; the adjoint of `decode`."""
        if self.factor == 1:
            return gradient
        rows, columns = self.enlarge
        return _mapped(self._joined(gradient), rows.mT, columns.mT)

    def pack(self, images: Tensor) -> Tensor:
        """Shrink images (n * factor^2, C, H, W) into the tiles of n."""
        return images if self.factor == 1 else _mapped(self._joined(images), *self.shrink)

    def tiled(self, images: Tensor) -> Tensor:
        """Shrink each of the images (n, C, H, W) into all of its tiles."""
        if self.factor == 1:
            return images
        return _mapped(images, *(self._everywhere(shrink) for shrink in self.shrink))

    def in_small(self) -> "Formation":
        """A formation that decodes to tiles of 1 / `factor` of the size, averaged from large ones.

        Only `decode` and `pullback` are of use: to see the tiles as `shrunk` images are seen.
        """
        if self.factor == 1:
            return self
        rows, columns = (
            _block_diagonal([_averages(len(e) // self.factor, self.factor).to(e)] * self.factor) @ e
            for e in self.enlarge
        )
        return replace(self, enlarge=(rows, columns))

    def shrunk(self, images: Tensor) -> Tensor:
        """Images (n, C, H, W) averaged to (n, C, H // factor, W // factor)."""
        height, width = images.shape[-2:]
        return functional.adaptive_avg_pool2d(images, (height // self.factor, width // self.factor))

    def coarse(self, images: Tensor) -> Tensor:
        """Images (n, C, H, W) as they come back from a tile, the first: shrunk and enlarged."""
        if self.factor == 1:
            return images
        maps = zip(self.enlarge, self.shrink, strict=True)
        return _mapped(images, *(e[: len(s)] @ self._everywhere(s) for e, s in maps))

    def repeated(self, of_images: Tensor) -> Tensor:
        """What belongs to each image, along the first dimension, for its tiles."""
        return of_images.repeat_interleave(self.factor**2, 0)

    def _everywhere(self, shrink: Tensor) -> Tensor:
        """(size, factor * size) to (size, size): shrinks one and the same into every tile."""
        return shrink.reshape(len(shrink), self.factor, -1).sum(1)

    def _cut(self, mosaic: Tensor) -> Tensor:
        """(..., n, C, factor * H, factor * W) to (..., n * factor^2, C, H, W)."""
        *first, height, width = mosaic.shape
        sides = self.factor, height // self.factor, self.factor, width // self.factor
        return mosaic.reshape(*first, *sides).movedim((-4, -2), (-5, -4)).flatten(-6, -4)

    def _joined(self, tiles: Tensor) -> Tensor:
        """(..., n * factor^2, C, H, W) to (..., n, C, factor * H, factor * W)."""
        apart = tiles.reshape(*tiles.shape[:-4], -1, self.factor, self.factor, *tiles.shape[-3:])
        return apart.movedim((-5, -4), (-4, -2)).flatten(-4, -3).flatten(-2, -1)


def _mapped(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return rows @ images @ columns.mT


def _averages(size: int, factor: int) -> Tensor:
    """(size // factor, size): from a side of an image to one of its tiles' size."""
    return functional.adaptive_avg_pool1d(torch.eye(size), size // factor).T


def _resizing(size: int, factor: int) -> tuple[Tensor, Tensor]:
    """Maps along one side: (factor * size, size) to enlarge, (size, factor * size) to shrink."""
    edges = [size * i // factor for i in range(factor + 1)]
    widths = [end - begin for begin, end in pairwise(edges)]
    enlarge = [
        functional.interpolate(torch.eye(width)[None], size=size, mode="linear")[0].T
        for width in widths
    ]
    shrink = [functional.adaptive_avg_pool1d(torch.eye(size), width).T for width in widths]
    return _block_diagonal(enlarge), _block_diagonal(shrink)


def _block_diagonal(blocks: list[Tensor]) -> Tensor:
    matrix: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    return matrix
