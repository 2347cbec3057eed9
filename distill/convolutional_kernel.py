"""Neural tangent kernel of a wide convolutional network without pooling, in bounded memory.

Without pooling, only covariances between the same pixel of both images matter: (m, n, H, W) numbers
instead of (m, n, H, W, H, W). They are computed a few real images at a time, and again in the
pull-back, so memory does not grow with m.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from distill.kernels import (
    BIAS_VARIANCE,
    DEPTH,
    WEIGHT_VARIANCE,
    Kernel,
    Pullback,
    ReluLayer,
    relu_layer,
    relu_layer_pullback,
)

CHUNK_FLOATS = 2**23


class _Layers(NamedTuple):
    """Forward pass of a chunk: each layer with the virtual images' own covariances."""

    layers: list[tuple[ReluLayer, Tensor]]
    value: Tensor


def convolutional_ntk(shape: tuple[int, ...], *, depth: int = DEPTH) -> Kernel:
    """NTK of `depth` 3x3 convolutions with ReLU, then flattening and a dense layer.

    Arora et al. 2019, section 4.2 (CNTK with vectorisation instead of pooling), zero padding,
    stride 1. With A the mean over a pixel's 3x3 neighbours, in both images at once::

        S_0 = T_0 = w A(x z) + b;  S <- A(S') + b,  T <- S + A(T')

    per layer (`distill.kernels.relu_layer`), with the mean over all pixels instead of A after the
    last one. Costs about 40 element-wise passes per layer over (m, n, H, W).

    Parameters
    ----------
    shape : tuple[int, int, int]
        (C, H, W); the kernel takes images flattened to (..., n, C * H * W).
    depth : int (default: 3)
        Convolutions; at least 1.
    """

    def kernel(virtual: Tensor, real: Tensor | None = None) -> tuple[Tensor, Pullback]:
        images = virtual.reshape(*virtual.shape[:-1], *shape)
        others = images if real is None else real.reshape(*real.shape[:-1], *shape)
        right = _squares(images)
        left = right if real is None else _squares(others)
        rows = max(1, CHUNK_FLOATS // images[..., 0, :, :].numel())

        def chunks() -> Iterator[tuple[slice, Tensor, _Layers]]:
            for first in range(0, others.shape[-4], rows):
                part = slice(first, first + rows)
                own = others[..., part, :, :, :]
                same = first if real is None else None
                yield part, own, _forward(own, images, left[..., part, :, :], right, depth, same)

        value = torch.cat([chunk.value for _, _, chunk in chunks()], dim=-2)

        def by_virtual(upstream: Tensor) -> Tensor:
            if real is None:  # each virtual image is on both sides of a symmetric K
                upstream = upstream + upstream.mT
            gradient = torch.zeros_like(images)
            for part, own, chunk in chunks():
                by_products, by_squares = _pullback(chunk, upstream[..., part, :])
                gradient += torch.einsum("...ijhw,...ichw->...jchw", by_products, own)
                gradient += 2 * by_squares.unsqueeze(-3) * images
            return (gradient / shape[0]).flatten(-3)

        return value, by_virtual

    return kernel


def _forward(
    own: Tensor, images: Tensor, left: Tensor, right: Tensor, depth: int, same: int | None
) -> _Layers:
    """Compare `own` images with all virtual ones; `same` is their index if they are virtual."""
    w, b = WEIGHT_VARIANCE, BIAS_VARIANCE

    def exact(covariance: Tensor) -> Tensor:
        """Set an image's covariance with itself to the exact bits of its own."""
        if same is not None:
            diagonal = covariance.diagonal(same, dim1=-4, dim2=-3)
            diagonal.copy_(left.movedim(-3, -1))
        return covariance

    left, right = w * _blur(left) + b, w * _blur(right) + b
    products = torch.einsum("...ichw,...jchw->...ijhw", own, images) / own.shape[-3]
    covariance = tangent = exact(w * _blur(products) + b)
    layers: list[tuple[ReluLayer, Tensor]] = []
    while True:
        squares = left.unsqueeze(-3) * right.unsqueeze(-4)
        covariance, tangent, layer = relu_layer(covariance, tangent, squares)
        layers.append((layer, right))
        if len(layers) == depth:
            value = covariance.mean((-2, -1)) + b + tangent.mean((-2, -1))
            return _Layers(layers, value)
        left, right = w / 2 * _blur(left) + b, w / 2 * _blur(right) + b
        covariance = exact(_blur(covariance) + b)
        tangent = covariance + _blur(tangent)


def _pullback(chunk: _Layers, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient by the pixel products (..., rows, n, H, W) and by the virtual images' squares."""
    w = WEIGHT_VARIANCE
    pixels = chunk.layers[-1][1].shape[-2:].numel()
    by_covariance = (upstream / pixels)[..., None, None].expand_as(chunk.layers[-1][0].sine)
    by_tangent = by_covariance
    by_right = torch.zeros_like(chunk.layers[-1][1])
    for number, (layer, right) in enumerate(reversed(chunk.layers)):
        if number > 0:
            by_covariance, by_tangent = _blur(by_covariance + by_tangent), _blur(by_tangent)
        by_covariance, by_tangent, by_log_norm = relu_layer_pullback(
            layer, by_covariance, by_tangent
        )
        by_right = w / 2 * _blur(by_right) + by_log_norm.sum(-4) / (2 * right)
    return w * _blur(by_covariance + by_tangent), w * _blur(by_right)


def _squares(images: Tensor) -> Tensor:
    """Mean square over the channels at each pixel, (..., n, H, W)."""
    return torch.einsum("...chw,...chw->...hw", images, images) / images.shape[-3]


def _blur(maps: Tensor) -> Tensor:
    """A: sum of the 3x3 neighbours over 9, zeros outside; its own adjoint."""
    # Two matrix products, much faster on a CPU than average pooling.
    height, width = maps.shape[-2:]
    rows, columns = (
        torch.ones(size, size, dtype=maps.dtype, device=maps.device).triu(-1).tril(1) / 3
        for size in (height, width)
    )
    return rows @ maps @ columns
