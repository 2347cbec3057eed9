"""The kernel equals the paper's recursion and the networks it is the limit of."""

import itertools
import math

import numpy as np
import pytest
import torch

from flwr_distill.distill.ntk import BIAS_VARIANCE, WEIGHT_VARIANCE, ntk, relu_ntk

W, B = WEIGHT_VARIANCE, BIAS_VARIANCE


def inner_products(x, z):
    d = x.shape[-1]
    return x @ z.mT / d, x.square().sum(-1) / d, z.square().sum(-1) / d


def naive_ntk(x, z, depth):
    """NTK by Jacot et al.'s recursion for one pair of points, as scalars."""
    d = len(x)
    xz = W * float(x @ z) / d + B
    xx = W * float(x @ x) / d + B
    zz = W * float(z @ z) / d + B
    tangent = xz
    for _ in range(depth):
        norm = math.sqrt(xx * zz)
        theta = math.acos(max(-1.0, min(1.0, xz / norm)))
        kappa1 = norm * (math.sin(theta) + (math.pi - theta) * math.cos(theta)) / (2 * math.pi)
        kappa0 = (math.pi - theta) / (2 * math.pi)
        xz = W * kappa1 + B
        tangent = xz + W * kappa0 * tangent
        xx, zz = W * xx / 2 + B, W * zz / 2 + B
    return tangent


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_ntk_equals_the_naive_recursion(depth, dtype, tolerance):
    rng = np.random.default_rng(depth)
    x, z = rng.standard_normal((6, 9)), rng.standard_normal((4, 9))
    products = [p.to(dtype) for p in inner_products(torch.from_numpy(x), torch.from_numpy(z))]
    expected = np.array([[naive_ntk(a, c, depth) for c in z] for a in x])
    value, _ = relu_ntk(*products, depth=depth)
    np.testing.assert_allclose(value.double().numpy(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ntk_of_a_point_with_itself_is_exact(dtype):
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
def test_ntk_is_the_mean_tangent_kernel_of_wide_networks(depth):
    """Monte-Carlo: gradients' inner products in finite networks of width 512."""
    generator = torch.Generator().manual_seed(depth)
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
    generator = torch.Generator().manual_seed(0)
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
    points = torch.randn(6, 12, generator=torch.Generator().manual_seed(0))
    value, _ = ntk(points)
    exact, _ = ntk(points.double())
    torch.testing.assert_close(value, exact.float(), rtol=2e-6, atol=2e-6)
