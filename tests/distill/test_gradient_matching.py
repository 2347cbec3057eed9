"""Gradient matching: the distance is that of plain loops, and falls."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from flwr_distill.distill import DistillError
from flwr_distill.distill.gradient_matching import gradient_distance, match_gradient


def naive_distance(a: list[Tensor], b: list[Tensor]) -> float:
    """The papers' double sum, one output node after the other, in Python's floats."""
    total = 0.0
    for x, y in zip(a, b, strict=True):
        if x.ndim == 1:
            continue
        for row, other in zip(x, y, strict=True):
            u, v = row.flatten().tolist(), other.flatten().tolist()
            dot = sum(p * q for p, q in zip(u, v, strict=True))
            total += 1 - dot / (sum(p * p for p in u) * sum(q * q for q in v)) ** 0.5
    return total


SHAPES = [(5, 3, 3, 3), (5,), (4, 7), (4,)]


@given(st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_distance_is_the_papers_double_sum(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = ([torch.randn(s, generator=generator) for s in SHAPES] for _ in range(2))
    assert float(gradient_distance(a, b)) == pytest.approx(naive_distance(a, b), rel=1e-5)


@given(st.integers(0, 10**6), st.floats(1e-3, 1e3))
@settings(max_examples=20, deadline=None)
def test_distance_ignores_length_and_one_dimensional_parameters(seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = ([torch.randn(s, generator=generator) for s in SHAPES] for _ in range(2))
    changed = [scale * x if x.ndim > 1 else torch.randn_like(x) for x in b]
    torch.testing.assert_close(gradient_distance(a, b), gradient_distance(a, changed))
    assert float(gradient_distance(a, a)) == pytest.approx(0, abs=1e-5)
    assert float(gradient_distance(a, [-x for x in a])) == pytest.approx(18, rel=1e-5)


def test_a_row_of_zeros_counts_one_on_either_side_and_one_in_the_target_has_no_slope() -> None:
    a, b = torch.ones(5, 4), torch.ones(5, 4)
    a[0], b[1], b[2] = 0, 0, -1
    a[3], b[3] = 0, 0
    a.requires_grad_()
    for x, y in ((a, b), (b, a)):
        distance = gradient_distance([x], [y])
        assert float(distance.detach()) == pytest.approx(1 + 1 + 2 + 1 + 0, abs=1e-6)
    (slope,) = torch.autograd.grad(distance, a)
    assert bool(slope.isfinite().all())
    assert float(slope[[1, 3]].abs().max()) == 0


def test_a_unit_that_is_dead_counts_one_and_moves_no_pixel() -> None:
    """Its row of the gradient is zeros; the images become what they would without it."""
    generator = torch.Generator().manual_seed(0)
    small = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 3))
    large = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 3))
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        for big, own in zip(large.parameters(), small.parameters(), strict=True):
            big.zero_()[tuple(slice(n) for n in own.shape)] = own
        large[1].bias[5] = -100.0
        large[3].weight[:, 5] = 1.0
    labels = torch.arange(6) % 3
    unseen, noise = (torch.randn(6, 1, 4, 4, generator=generator) for _ in range(2))
    made: list[Tensor] = []
    distances: list[list[float]] = [[], []]
    for model, seen in zip((small, large), distances, strict=True):
        target = cross_entropy_gradient(model, unseen, labels)

        def note(step: int, steps: int, distance: float, seen: list[float] = seen) -> None:
            seen.append(distance)

        made.append(match_gradient(noise, labels, target, model, steps=5, progress=note))
    assert not torch.equal(made[0], noise)
    torch.testing.assert_close(made[1], made[0])
    assert distances[1] == pytest.approx([1 + distance for distance in distances[0]], rel=1e-5)


def small_model(norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), norm, nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Dropout(0.5), nn.Linear(8 * 16, 3),
    )  # fmt: skip


def cross_entropy_gradient(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    model = copy.deepcopy(model).eval()
    loss = functional.cross_entropy(model(images), labels)
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 8), nn.BatchNorm2d(8), nn.Identity()])
def test_refined_noise_has_the_gradient_of_the_unseen_images(norm: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    model = small_model(norm)
    labels = torch.arange(12) % 3
    unseen, noise = (torch.randn(12, 1, 8, 8, generator=generator) for _ in range(2))
    target = cross_entropy_gradient(model, unseen + labels[:, None, None, None], labels)
    seen: list[float] = []
    before = copy.deepcopy(model.state_dict())
    refined = match_gradient(
        noise, labels, target, model, progress=lambda step, steps, loss: seen.append(loss)
    )
    reached = cross_entropy_gradient(model, refined, labels)
    distances = [
        float(gradient_distance(list(g.values()), list(target.values())))
        for g in (cross_entropy_gradient(model, noise, labels), reached)
    ]
    assert seen[0] == pytest.approx(distances[0], rel=1e-4)
    assert distances[1] < 0.1 * distances[0]
    assert refined.shape == noise.shape
    assert not refined.requires_grad
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_a_weight_difference_serves_as_target() -> None:
    generator = torch.Generator().manual_seed(0)
    model = small_model(nn.GroupNorm(2, 8))
    labels = torch.arange(12) % 3
    unseen, noise = (torch.randn(12, 1, 8, 8, generator=generator) for _ in range(2))
    target = cross_entropy_gradient(model, unseen, labels)
    after = {name: w.detach() - 0.01 * target[name] for name, w in model.named_parameters()}
    difference = {name: w.detach() - after[name] for name, w in model.named_parameters()}
    one, two = (match_gradient(noise, labels, t, model, steps=5) for t in (target, difference))
    torch.testing.assert_close(one, two, rtol=0, atol=1e-2)


def test_targets_that_do_not_fit_are_refused_with_the_remedy() -> None:
    model = nn.Linear(4, 3)
    images, labels = torch.randn(2, 4), torch.tensor([0, 1])
    for target, complaint in [
        ({"bias": torch.zeros(3)}, r"misses \['weight'\]; name the gradients as in"),
        ({"weight": torch.zeros(3, 5)}, r"must have the weight's shape \(3, 4\), got \(3, 5\)"),
        ({"weight": torch.full((3, 4), torch.nan)}, "holds NaN or infinity"),
    ]:
        with pytest.raises(DistillError, match=complaint):
            match_gradient(images, labels, target, model)
    with pytest.raises(DistillError, match="weights of two or more dimensions"):
        match_gradient(images, labels, {}, nn.BatchNorm1d(4))
