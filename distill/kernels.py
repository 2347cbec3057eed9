"""Kernels of infinitely wide networks, each with the pull-back of its gradient.

A kernel here is a function of inner products alone. It takes, for two sets of n and m points
of dimension d (leading batch dimensions allowed):

- gram: (..., n, m), the products <x_i, z_j> / d,
- left: (..., n), the squares |x_i|^2 / d,
- right: (..., m), the squares |z_j|^2 / d,

and returns its value K, (..., n, m), with a function that turns dL/dK into dL/dgram, dL/dleft
and dL/dright. No autograd is involved. Of a point with itself, gram must equal left and right
to the last bit: the kernels have infinite slope there, and rounding would show.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

_TWO_PI = 2 * math.pi


class InnerProductGradient(NamedTuple):
    """Gradient of a loss by the inner products that a kernel was given."""

    gram: Tensor
    left: Tensor
    right: Tensor


Pullback = Callable[[Tensor], InnerProductGradient]


class Kernel(Protocol):
    """A kernel of inner products with its pull-back; see the module's text."""

    def __call__(self, gram: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Pullback]:
        """Return K (..., n, m) and the function from dL/dK to the inner products' gradient."""
        ...


class _Layer(NamedTuple):
    covariance: Tensor
    tangent: Tensor
    sine: Tensor
    slope: Tensor
    left: Tensor
    right: Tensor


def relu_ntk(
    gram: Tensor,
    left: Tensor,
    right: Tensor,
    *,
    depth: int = 3,
    weight_variance: float = 2.0,
    bias_variance: float = 0.01,
) -> tuple[Tensor, Pullback]:
    """Neural tangent kernel of a fully connected ReLU network in its infinite-width limit.

    The arc-cosine recursion (Cho and Saul 2009, eq. 3 and 6; Jacot et al. 2018, theorem 1),
    with w and b the variances, S_0 = T_0 = w gram + b, and for each hidden layer, with
    n = sqrt(left right) and theta = arccos(S / n)::

        S' = w (n sin(theta) + (pi - theta) S) / (2 pi) + b
        T' = S' + w (pi - theta) / (2 pi) T

    Costs about a dozen element-wise passes over (n, m) a layer, forward and back each.

    Parameters
    ----------
    gram, left, right : Tensor
        Inner products, as the module says; any floating type.
    depth : int (default: 3)
        Hidden layers.
    weight_variance : float (default: 2.0)
        Variance of a weight times its layer's fan-in; 2 keeps the norm from layer to layer.
    bias_variance : float (default: 0.01)
        Variance of a bias.

    Returns
    -------
    tuple[Tensor, Pullback]
        T after the last layer, and its pull-back.
    """
    w, b = weight_variance, bias_variance
    covariance = tangent = w * gram + b
    left, right = w * left + b, w * right + b
    rounding = 8 * torch.finfo(gram.dtype).eps
    layers: list[_Layer] = []
    for _ in range(depth):
        squares = left.unsqueeze(-1) * right.unsqueeze(-2)
        # n sin(theta); what is within rounding of parallel counts as parallel.
        sine = functional.threshold(1 - covariance.square() / squares, rounding, 0.0)
        sine = sine.mul_(squares).sqrt_()
        slope = torch.atan2(sine, covariance).mul_(-1 / _TWO_PI).add_(0.5)  # (pi-theta)/(2 pi)
        layers.append(_Layer(covariance, tangent, sine, slope, left, right))
        covariance = torch.addcmul(sine * (1 / _TWO_PI), slope, covariance).mul_(w).add_(b)
        tangent = torch.addcmul(covariance, slope, tangent, value=w)
        left, right = w / 2 * left + b, w / 2 * right + b

    def pullback(upstream: Tensor) -> InnerProductGradient:
        by_tangent = upstream
        by_covariance = torch.zeros_like(upstream)
        by_left = by_right = torch.zeros((), dtype=upstream.dtype, device=upstream.device)
        for layer in reversed(layers):
            by_covariance = by_covariance + by_tangent
            # Of parallel points the angle's slope is infinite, but what it carries to the
            # squares and to the gram cancels: drop both.
            inverse = torch.where(layer.sine > 0, 1 / layer.sine, 0.0)
            by_angle = (by_tangent * layer.tangent).mul_(inverse).mul_(w / _TWO_PI)
            by_log_norm = (by_covariance * layer.sine).mul_(w / _TWO_PI)
            by_log_norm.addcmul_(by_angle, layer.covariance, value=-1)
            by_left = w / 2 * by_left + by_log_norm.sum(-1) / (2 * layer.left)
            by_right = w / 2 * by_right + by_log_norm.sum(-2) / (2 * layer.right)
            scaled_slope = w * layer.slope
            by_covariance = torch.addcmul(by_angle, by_covariance, scaled_slope)
            by_tangent = by_tangent * scaled_slope
        return InnerProductGradient(w * (by_covariance + by_tangent), w * by_left, w * by_right)

    return tangent, pullback
