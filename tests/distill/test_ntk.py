"""The kernel equals the paper's recursion and the networks it is the limit of."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.metrics.pairwise import rbf_kernel
from torch import Tensor
from torch.nn import functional

from distill.convolutional_kernel import convolutional_ntk
from distill.features import RandomConvNet
from distill.kernels import (
    BIAS_VARIANCE,
    WEIGHT_VARIANCE,
    Kernel,
    Recursion,
    fully_connected_nngp,
    fully_connected_ntk,
    gaussian,
    rbf,
    relu_nngp,
    relu_ntk,
)
from distill.random_feature_kernel import random_feature_kernel

W, B = WEIGHT_VARIANCE, BIAS_VARIANCE


def inner_products(x: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    d = x.shape[-1]
    return x @ z.mT / d, x.square().sum(-1) / d, z.square().sum(-1) / d


def naive_kernels(
    x: NDArray[np.float64], z: NDArray[np.float64], depth: int
) -> tuple[float, float]:
    """NTK and NNGP by Jacot et al.'s recursion for one pair of points, as scalars."""
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
    return tangent, xz


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_ntk_and_nngp_equal_the_naive_recursion(
    depth: int, dtype: torch.dtype, tolerance: float
) -> None:
    rng = np.random.default_rng(depth)
    x, z = rng.standard_normal((6, 9)), rng.standard_normal((4, 9))
    products = [p.to(dtype) for p in inner_products(torch.from_numpy(x), torch.from_numpy(z))]
    expected = np.array([[naive_kernels(a, c, depth) for c in z] for a in x])
    for which, recursion in enumerate((relu_ntk, relu_nngp)):
        value, _ = recursion(*products, depth=depth)
        np.testing.assert_allclose(
            value.double().numpy(), expected[..., which], rtol=tolerance, atol=tolerance
        )


def test_rbf_equals_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    x, z = rng.standard_normal((6, 9)), rng.standard_normal((4, 9))
    value, _ = rbf(*inner_products(torch.from_numpy(x), torch.from_numpy(z)), bandwidth=0.7)
    np.testing.assert_allclose(value, rbf_kernel(x, z, gamma=1 / (2 * 9 * 0.7**2)), rtol=1e-12)


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


RECURSIONS = [partial(f, depth=n) for f in (relu_ntk, relu_nngp) for n in (0, 1, 3)] + [rbf]


@pytest.mark.parametrize("recursion", RECURSIONS)
def test_pullback_equals_finite_differences(recursion: Recursion) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    z = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    upstream = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    products = inner_products(x, z)
    gradient = recursion(*products)[1](upstream)
    for which, own in ((0, gradient.gram), (2, gradient.right)):
        direction = torch.randn(products[which].shape, generator=generator, dtype=torch.float64)

        def loss(t: float, which: int = which, direction: Tensor = direction) -> float:
            moved = [p + t * direction if i == which else p for i, p in enumerate(products)]
            return float((recursion(*moved)[0] * upstream).sum())

        slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
        assert float((own * direction).sum()) == pytest.approx(slope, rel=1e-7, abs=1e-9)


SHAPE = (2, 8, 9)
KERNELS = {
    "ntk": fully_connected_ntk,
    "nngp": fully_connected_nngp,
    "rbf": gaussian,
    "conv": convolutional_ntk(SHAPE),
    "conv of one layer": convolutional_ntk(SHAPE, depth=1),
}


@pytest.mark.parametrize("with_real", [True, False])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_gradient_by_the_virtual_points_equals_finite_differences(
    kernel: Kernel, with_real: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    virtual, real, direction = (
        torch.randn(n, math.prod(SHAPE), generator=generator, dtype=torch.float64)
        for n in (4, 5, 4)
    )
    others = real if with_real else None
    value, pullback = kernel(virtual, others)
    upstream = torch.randn(value.shape, generator=generator, dtype=torch.float64)

    def loss(t: float) -> float:
        return float((kernel(virtual + t * direction, others)[0] * upstream).sum())

    slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
    assert float((pullback(upstream) * direction).sum()) == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_leading_dimensions_are_separate_problems(kernel: Kernel) -> None:
    generator = torch.Generator().manual_seed(0)
    virtual = torch.randn(3, 4, math.prod(SHAPE), generator=generator)
    real = torch.randn(3, 5, math.prod(SHAPE), generator=generator)
    for others, rows in ((real, 5), (None, 4)):
        upstream = torch.randn(3, rows, 4, generator=generator)
        value, pullback = kernel(virtual, others)
        gradient = pullback(upstream)
        for i in range(3):
            own, own_pullback = kernel(virtual[i], None if others is None else others[i])
            torch.testing.assert_close(value[i], own)
            torch.testing.assert_close(gradient[i], own_pullback(upstream[i]))


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_a_point_has_the_same_kernel_among_virtual_and_real_ones(kernel: Kernel) -> None:
    """The exact diagonal of float32 agrees with float64's, which rounding spoils least."""
    points = torch.randn(6, math.prod(SHAPE), generator=torch.Generator().manual_seed(0))
    value, _ = kernel(points)
    exact, _ = kernel(points.double())
    torch.testing.assert_close(value, exact.float(), rtol=2e-6, atol=2e-6)


def naive_convolutional_ntk(x: Tensor, z: Tensor, depth: int) -> float:
    """Arora et al.'s CNTK recursion for two images, with covariances of all pairs of pixels."""
    channels, height, width = x.shape

    def neighbours(covariance: Tensor) -> Tensor:
        """w / 9 times the sum over the 3x3 offsets, taken of both pixels alike, plus b."""
        padded = functional.pad(covariance.reshape(height, width, height, width), (1,) * 8)
        total = torch.zeros(height, width, height, width, dtype=x.dtype)
        for i, j in itertools.product(range(3), repeat=2):
            total += padded[i : i + height, j : j + width, i : i + height, j : j + width]
        return total / 9

    def products(a: Tensor, c: Tensor) -> Tensor:
        return W * neighbours(torch.einsum("chw,cij->hwij", a, c) / channels) + B

    s, own, other = products(x, z), products(x, x), products(z, z)
    t = s
    for layer in range(1, depth + 1):

        def relu(s: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
            diagonal_p = torch.einsum("hwhw->hw", p)[:, :, None, None]
            diagonal_q = torch.einsum("hwhw->hw", q)[None, None]
            norm = (diagonal_p * diagonal_q).sqrt()
            theta = torch.acos((s / norm).clamp(-1, 1))
            kappa = norm * (theta.sin() + (math.pi - theta) * theta.cos()) / (2 * math.pi)
            return W * kappa, W * (math.pi - theta) / (2 * math.pi)

        after, slope = relu(s, own, other)
        t = slope * t
        own, other = relu(own, own, own)[0], relu(other, other, other)[0]
        if layer < depth:
            s, own, other = (neighbours(c) + B for c in (after, own, other))
            t = s + neighbours(t)
    mean = torch.einsum("hwhw->hw", after).mean() + B
    return float(mean + torch.einsum("hwhw->hw", t).mean())


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_convolutional_ntk_equals_the_recursion_over_all_pairs_of_pixels(depth: int) -> None:
    images = torch.randn(
        4, 2, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    kernel = convolutional_ntk((2, 4, 5), depth=depth)
    value, _ = kernel(images[:2].flatten(1), images[2:].flatten(1))
    for i, j in itertools.product(range(2), repeat=2):
        expected = naive_convolutional_ntk(images[2 + i], images[j], depth)
        assert float(value[i, j]) == pytest.approx(expected, rel=1e-10)


def test_convolutional_ntk_does_not_depend_on_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    virtual, real = (torch.randn(n, math.prod(SHAPE), generator=generator) for n in (4, 7))
    kernel = convolutional_ntk(SHAPE)
    for others in (real, None):
        value, pullback = kernel(virtual, others)
        gradient = pullback(torch.ones_like(value))
        monkeypatch.setattr("distill.convolutional_kernel.CHUNK_FLOATS", 1)
        small, small_pullback = kernel(virtual, others)
        torch.testing.assert_close(small, value)
        torch.testing.assert_close(small_pullback(torch.ones_like(value)), gradient)
        monkeypatch.undo()


def test_neural_tangents_gives_the_same_kernels() -> None:
    """An independent library, where it is installed (it is no dependency of ours)."""
    jax = pytest.importorskip("jax")
    stax = pytest.importorskip("neural_tangents").stax
    jax.config.update("jax_enable_x64", True)
    scales = {"W_std": math.sqrt(W), "b_std": math.sqrt(B)}
    rng = np.random.default_rng(0)

    dense = [layer for _ in range(3) for layer in (stax.Dense(1, **scales), stax.Relu())]
    *_, reference = stax.serial(*dense, stax.Dense(1, **scales))
    x, z = rng.standard_normal((6, 9)), rng.standard_normal((4, 9))
    points = torch.from_numpy(z), torch.from_numpy(x)
    for name, kernel in (("ntk", fully_connected_ntk), ("nngp", fully_connected_nngp)):
        np.testing.assert_allclose(kernel(*points)[0], reference(x, z, name), rtol=1e-12)

    convolution = stax.Conv(1, (3, 3), padding="SAME", **scales)
    layers = [layer for _ in range(3) for layer in (convolution, stax.Relu())]
    *_, reference = stax.serial(*layers, stax.Flatten(), stax.Dense(1, **scales))
    x, z = rng.standard_normal((3, 2, 5, 6)), rng.standard_normal((2, 2, 5, 6))
    value, _ = convolutional_ntk((2, 5, 6))(
        torch.from_numpy(z).flatten(1), torch.from_numpy(x).flatten(1)
    )
    expected = reference(x.transpose(0, 2, 3, 1), z.transpose(0, 2, 3, 1), "ntk")
    np.testing.assert_allclose(value, expected, rtol=1e-12)


def test_random_features_are_the_mean_inner_product_of_the_networks() -> None:
    kernel = random_feature_kernel(SHAPE, seed=1, networks=3, width=5)
    generator = torch.Generator().manual_seed(1)
    networks = [RandomConvNet.draw(SHAPE[0], SHAPE[1], 5, generator) for _ in range(3)]
    images = torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(0))
    value, _ = kernel(images[:2].flatten(1), images[2:].flatten(1))
    features = [[network(image[None]).flatten() for network in networks] for image in images]
    for i, j in itertools.product(range(2), repeat=2):
        pairs = list(zip(features[2 + i], features[j], strict=True))
        expected = sum(float(a @ c) for a, c in pairs) / sum(len(a) for a, _ in pairs) + B
        assert float(value[i, j]) == pytest.approx(expected, rel=1e-5)


def test_random_features_gradient_equals_autograd() -> None:
    kernel = random_feature_kernel(SHAPE, seed=1, networks=2, width=4)
    generator = torch.Generator().manual_seed(0)
    virtual, real = (torch.randn(n, math.prod(SHAPE), generator=generator) for n in (3, 5))
    networks = [
        RandomConvNet.draw(SHAPE[0], SHAPE[1], 4, drawn)
        for drawn in [torch.Generator().manual_seed(1)]
        for _ in range(2)
    ]
    leaf = virtual.clone().requires_grad_()
    phi = torch.cat([network(leaf.reshape(-1, *SHAPE)) for network in networks], dim=1)
    others = torch.cat([network(real.reshape(-1, *SHAPE)) for network in networks], dim=1)
    for given, compared in ((real, others), (None, phi)):
        upstream = torch.randn(len(compared), 3, generator=generator)
        loss = (compared @ phi.mT / phi.shape[1] * upstream).sum()
        (expected,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        _, pullback = kernel(virtual, given)
        torch.testing.assert_close(pullback(upstream), expected, rtol=1e-4, atol=1e-6)
