"""The kernel equals the paper's recursion and the networks it is the limit of."""

import itertools
import math

import numpy as np
import pytest
import torch

from flwr_distill.distill.ntk import BIAS_VARIANCE, WEIGHT_VARIANCE, ntk, relu_ntk
from tests.distill.builders import naive_ntk, normal, seeded

W, B = WEIGHT_VARIANCE, BIAS_VARIANCE


def inner_products(x, z):
    d = x.shape[-1]
    return x @ z.mT / d, x.square().sum(-1) / d, z.square().sum(-1) / d


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_ntk_equals_the_naive_recursion(depth, dtype, tolerance):
    x, z = (normal(rows, 9, seed=rows + depth).double() for rows in (6, 4))
    products = [product.to(dtype) for product in inner_products(x, z)]
    value, _ = relu_ntk(*products, depth=depth)
    expected = naive_ntk(x, z, depth)
    torch.testing.assert_close(value.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ntk_of_a_point_with_itself_is_exact(dtype):
    squares = torch.rand(50, dtype=dtype, generator=seeded()) * 5
    value, _ = relu_ntk(torch.diag(squares), squares, squares, depth=3)
    covariance = tangent = 2 * squares.double() + 0.01
    for _ in range(3):  # the angle is 0, both arc-cosine functions are 1/2
        covariance = covariance + 0.01
        tangent = covariance + tangent
    torch.testing.assert_close(
        value.diagonal().double(), tangent, rtol=8 * torch.finfo(dtype).eps, atol=0
    )


@pytest.mark.parametrize("depth", [1, 2])
def test_ntk_is_the_mean_tangent_kernel_of_wide_networks(depth):
    """Monte-Carlo: gradients' inner products in finite networks of width 512."""
    generator = seeded(depth)
    w, b, width, d = 2.0, 0.01, 512, 5
    x = torch.randn(2, d, generator=generator, dtype=torch.float64)
    x[1] += x[0]
    sizes = [d] + [width] * depth + [1]

    def tangent():
        parameters = [
            (
                torch.randn(n, m, generator=generator, dtype=torch.float64, requires_grad=True),
                torch.randn(n, generator=generator, dtype=torch.float64, requires_grad=True),
            )
            for m, n in itertools.pairwise(sizes)
        ]
        flat = [p for pair in parameters for p in pair]

        def gradient(point):
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


@pytest.mark.parametrize("with_real", [True, False])
def test_gradient_by_the_virtual_points_equals_finite_differences(with_real):
    generator = seeded()
    virtual, real, direction = (
        torch.randn(n, 12, generator=generator, dtype=torch.float64) for n in (4, 5, 4)
    )
    others = real if with_real else None
    value, pullback = ntk(virtual, others)
    upstream = torch.randn(value.shape, generator=generator, dtype=torch.float64)

    def loss(t):
        return float((ntk(virtual + t * direction, others)[0] * upstream).sum())

    slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
    assert float((pullback(upstream) * direction).sum()) == pytest.approx(slope, rel=1e-6)


def test_a_point_has_the_same_kernel_among_virtual_and_real_ones():
    """The exact diagonal of float32 agrees with float64's, which rounding spoils least."""
    points = normal(6, 12)
    value, _ = ntk(points)
    exact, _ = ntk(points.double())
    torch.testing.assert_close(value, exact.float(), rtol=2e-6, atol=2e-6)
