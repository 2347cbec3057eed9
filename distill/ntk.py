"""The neural tangent kernel of an infinitely wide network, with a pull-back for its gradient."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

WEIGHT_VARIANCE = 2.0
"""Variance of a weight times its layer's fan-in; 2 preserves norms through ReLU layers."""

BIAS_VARIANCE = 0.01
DEPTH = 3
_TWO_PI = 2 * math.pi

Pullback = Callable[[Tensor], Tensor]


def ntk(virtual: Tensor, real: Tensor | None = None) -> tuple[Tensor, Pullback]:
    """Compare virtual points (..., n, d) with real ones (..., m, d), or with each other.

    The kernel is that of a fully connected ReLU network with three hidden layers (`relu_ntk`).
    Returns K (..., m, n) and the function from dL/dK to dL/dvirtual.
    """
    d = virtual.shape[-1]
    others = virtual if real is None else real
    right = _squares(virtual)
    left = right if real is None else _squares(others)
    gram = others @ virtual.mT / d
    if real is None:
        gram.diagonal(dim1=-2, dim2=-1).copy_(right)
    value, pullback = relu_ntk(gram, left, right)

    def by_virtual(upstream: Tensor) -> Tensor:
        if real is None:  # each virtual point is on both sides of a symmetric K
            upstream = upstream + upstream.mT
        gradient = pullback(upstream)
        by_squares = (2 / d * gradient.right).unsqueeze(-1)
        return torch.addcmul((gradient.gram / d).mT @ others, by_squares, virtual)

    return value, by_virtual


class InnerProductGradient(NamedTuple):
    """Gradient of a loss by inner products and the squares on the right."""

    gram: Tensor
    right: Tensor


def relu_ntk(
    gram: Tensor, left: Tensor, right: Tensor, *, depth: int = DEPTH
) -> tuple[Tensor, Callable[[Tensor], InnerProductGradient]]:
    """Neural tangent kernel of a fully connected ReLU network in its infinite-width limit.

    Jacot et al. 2018, theorem 1: S_0 = T_0 = w gram + b, and with `relu_layer` for each of `depth`
    hidden layers S <- S' + b, T <- S + T'. Takes the products <x_i, z_j> / d, (..., m, n), and the
    squares |x_i|^2 / d and |z_j|^2 / d. For a point with itself they must be equal to the last bit:
    the kernel has infinite slope there, so rounding would show. Returns K (..., m, n), and the
    function from dL/dK to the gradient by gram and right.
    """
    w, b = WEIGHT_VARIANCE, BIAS_VARIANCE
    covariance = tangent = w * gram + b
    left, right = w * left + b, w * right + b
    layers: list[tuple[ReluLayer, Tensor]] = []
    for _ in range(depth):
        squares = left.unsqueeze(-1) * right.unsqueeze(-2)
        covariance, tangent, layer = relu_layer(covariance, tangent, squares)
        covariance = covariance.add_(b)
        tangent = tangent.add_(covariance)
        layers.append((layer, right))
        left, right = w / 2 * left + b, w / 2 * right + b

    def pullback(upstream: Tensor) -> InnerProductGradient:
        by_tangent, by_covariance = upstream, torch.zeros_like(upstream)
        by_right = torch.zeros((), dtype=upstream.dtype, device=upstream.device)
        for layer, right in reversed(layers):
            by_covariance, by_tangent, by_log_norm = relu_layer_pullback(
                layer, by_covariance + by_tangent, by_tangent
            )
            by_right = w / 2 * by_right + by_log_norm.sum(-2) / (2 * right)
        return InnerProductGradient(w * (by_covariance + by_tangent), w * by_right)

    return tangent, pullback


class ReluLayer(NamedTuple):
    """Values of a ReLU layer's forward pass that its pull-back needs."""

    covariance: Tensor
    tangent: Tensor
    sine: Tensor
    slope: Tensor


def relu_layer(
    covariance: Tensor, tangent: Tensor, squares: Tensor
) -> tuple[Tensor, Tensor, ReluLayer]:
    """Arc-cosine step of a wide ReLU layer (Cho and Saul 2009, eq. 3 and 6).

    With S and T the covariance and tangent of the layer's inputs, squares the product of the two
    points' own covariances, w the weight variance, n = sqrt(squares) and theta = arccos(S / n),
    returns::

        S' = w (n sin(theta) + (pi - theta) S) / (2 pi)
        T' = w (pi - theta) / (2 pi) T

    and the input of `relu_layer_pullback`.
    """
    rounding = 8 * torch.finfo(covariance.dtype).eps
    # n sin(theta); points within rounding of parallel count as parallel.
    sine = functional.threshold(1 - covariance.square() / squares, rounding, 0.0)
    sine = sine.mul_(squares).sqrt_()
    slope = torch.atan2(sine, covariance).mul_(-1 / _TWO_PI).add_(0.5)  # (pi - theta) / (2 pi)
    layer = ReluLayer(covariance, tangent, sine, slope)
    w = WEIGHT_VARIANCE
    covariance = torch.addcmul(sine * (1 / _TWO_PI), slope, covariance).mul_(w)
    return covariance, (slope * tangent).mul_(w), layer


def relu_layer_pullback(
    layer: ReluLayer, by_covariance: Tensor, by_tangent: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient by S, T and log(sqrt(squares)), from that by S' and T'."""
    w = WEIGHT_VARIANCE
    # For parallel points the angle's slope is infinite, but its contributions to squares and
    # covariance cancel: drop both.
    inverse = torch.where(layer.sine > 0, 1 / layer.sine, 0.0)
    by_angle = (by_tangent * layer.tangent).mul_(inverse).mul_(w / _TWO_PI)
    by_log_norm = (by_covariance * layer.sine).mul_(w / _TWO_PI)
    by_log_norm.addcmul_(by_angle, layer.covariance, value=-1)
    scaled_slope = w * layer.slope
    by_inputs = torch.addcmul(by_angle, by_covariance, scaled_slope)
    return by_inputs, by_tangent * scaled_slope, by_log_norm


def _squares(points: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(points, dim=-1)
    return norm.square() / points.shape[-1]
