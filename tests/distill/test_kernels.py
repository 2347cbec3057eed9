"""The kernel equals the paper's recursion and the networks it is the limit of."""

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from distill.kernels import relu_ntk


def inner_products(x: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    d = x.shape[-1]
    return x @ z.mT / d, x.square().sum(-1) / d, z.square().sum(-1) / d


def naive_ntk(
    x: NDArray[np.float64], z: NDArray[np.float64], depth: int, w: float, b: float
) -> float:
    """Jacot et al.'s recursion for one pair of points, as scalars."""
    d = len(x)
    xz = w * float(x @ z) / d + b
    xx = w * float(x @ x) / d + b
    zz = w * float(z @ z) / d + b
    tangent = xz
    for _ in range(depth):
        norm = math.sqrt(xx * zz)
        theta = math.acos(max(-1.0, min(1.0, xz / norm)))
        kappa1 = norm * (math.sin(theta) + (math.pi - theta) * math.cos(theta)) / (2 * math.pi)
        kappa0 = (math.pi - theta) / (2 * math.pi)
        xz = w * kappa1 + b
        tangent = xz + w * kappa0 * tangent
        xx, zz = w * xx / 2 + b, w * zz / 2 + b
    return tangent


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
@pytest.mark.parametrize(("w", "b"), [(2.0, 0.01), (1.5, 0.0), (2.0, 1.0)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_ntk_equals_naive_recursion(
    depth: int, w: float, b: float, dtype: torch.dtype, tolerance: float
) -> None:
    rng = np.random.default_rng(depth)
    x, z = rng.standard_normal((6, 9)), rng.standard_normal((4, 9))
    products = inner_products(torch.from_numpy(x), torch.from_numpy(z))
    value, _ = relu_ntk(
        *(p.to(dtype) for p in products), depth=depth, weight_variance=w, bias_variance=b
    )
    expected = [[naive_ntk(a, c, depth, w, b) for c in z] for a in x]
    np.testing.assert_allclose(value.double().numpy(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ntk_of_a_point_with_itself_is_exact(dtype: torch.dtype) -> None:
    squares = torch.rand(50, dtype=dtype, generator=torch.Generator().manual_seed(0)) * 5
    value, _ = relu_ntk(torch.diag(squares), squares, squares, depth=3)
    covariance = tangent = 2 * squares.double() + 0.01
    for _ in range(3):  # the angle is 0, both arc-cosine functions are 1/2
        covariance = covariance + 0.01
        tangent = covariance + tangent
    torch.testing.assert_close(
        value.diagonal().double(), tangent, rtol=8 * torch.finfo(dtype).eps, atol=0
    )


@pytest.mark.parametrize("depth", [1, 2])
def test_ntk_is_the_mean_tangent_kernel_of_wide_networks(depth: int) -> None:
    """Monte-Carlo: gradients' inner products in finite networks of width 512."""
    generator = torch.Generator().manual_seed(depth)
    w, b, width, d = 2.0, 0.01, 512, 5
    x = torch.randn(2, d, generator=generator, dtype=torch.float64)
    x[1] += x[0]
    sizes = [d] + [width] * depth + [1]

    def tangent() -> float:
        parameters = [
            (
                torch.randn(n, m, generator=generator, dtype=torch.float64, requires_grad=True),
                torch.randn(n, generator=generator, dtype=torch.float64, requires_grad=True),
            )
            for m, n in itertools.pairwise(sizes)
        ]
        flat = [p for pair in parameters for p in pair]

        def gradient(point: Tensor) -> list[Tensor]:
            h = point
            for i, (weight, bias) in enumerate(parameters):
                h = math.sqrt(w / len(h)) * weight @ h + math.sqrt(b) * bias
                h = h.relu() if i < depth else h
            return list(torch.autograd.grad(h.sum(), flat))

        pairs = zip(gradient(x[0]), gradient(x[1]), strict=True)
        return float(sum((g * h).sum() for g, h in pairs))

    draws = np.array([tangent() for _ in range(60)])
    value, _ = relu_ntk(*inner_products(x[:1], x[1:]), depth=depth)
    error = draws.std(ddof=1) / math.sqrt(len(draws))
    assert abs(float(value) - draws.mean()) < 4 * error + 0.01 * abs(float(value))
    assert error < 0.05 * abs(float(value))


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_pullback_equals_finite_differences(depth: int) -> None:
    generator = torch.Generator().manual_seed(depth)
    x = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    z = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    upstream = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    products = inner_products(x, z)
    kernel = functools.partial(relu_ntk, depth=depth)
    gradients = kernel(*products)[1](upstream)
    for which in range(3):
        direction = torch.randn(products[which].shape, generator=generator, dtype=torch.float64)

        def loss(t: float, which: int = which, direction: Tensor = direction) -> float:
            moved = [p + t * direction if i == which else p for i, p in enumerate(products)]
            return float((kernel(*moved)[0] * upstream).sum())

        slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
        assert float((gradients[which] * direction).sum()) == pytest.approx(slope, rel=1e-7)


def test_leading_dimensions_are_separate_problems() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 6, generator=generator)
    z = torch.randn(3, 4, 6, generator=generator)
    upstream = torch.randn(3, 5, 4, generator=generator)
    value, pullback = relu_ntk(*inner_products(x, z), depth=2)
    batched = pullback(upstream)
    for i in range(3):
        own, own_pullback = relu_ntk(*inner_products(x[i], z[i]), depth=2)
        torch.testing.assert_close(value[i], own)
        for a, e in zip(batched, own_pullback(upstream[i]), strict=True):
            torch.testing.assert_close(a[i], e)
