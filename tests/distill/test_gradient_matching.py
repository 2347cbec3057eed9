"""Gradient matching: the distance is that of plain loops, and falls."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from flwr_distill.distill import DistillError
from flwr_distill.distill.gradient_matching import gradient_distance, match_gradient
from tests.distill.builders import seeded
from tests.errors import at


def naive_distance(a, b):
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
def test_distance_is_the_papers_double_sum(seed):
    generator = seeded(seed)
    a, b = ([torch.randn(s, generator=generator) for s in SHAPES] for _ in range(2))
    assert float(gradient_distance(a, b)) == pytest.approx(naive_distance(a, b), rel=1e-5)


@given(st.integers(0, 10**6), st.floats(1e-3, 1e3))
@settings(max_examples=20, deadline=None)
def test_distance_ignores_length_and_one_dimensional_parameters(seed, scale):
    generator = seeded(seed)
    a, b = ([torch.randn(s, generator=generator) for s in SHAPES] for _ in range(2))
    changed = [scale * x if x.ndim > 1 else torch.randn_like(x) for x in b]
    torch.testing.assert_close(gradient_distance(a, b), gradient_distance(a, changed))
    assert float(gradient_distance(a, a)) == pytest.approx(0, abs=1e-5)
    assert float(gradient_distance(a, [-x for x in a])) == pytest.approx(18, rel=1e-5)


def test_a_row_of_zeros_counts_one_on_either_side_and_one_in_the_target_has_no_slope():
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


def small_model(norm):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), norm, nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Dropout(0.5), nn.Linear(8 * 16, 3),
    )  # fmt: skip


def cross_entropy_gradient(model, images, labels):
    model = copy.deepcopy(model).eval()
    loss = functional.cross_entropy(model(images), labels)
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 8), nn.BatchNorm2d(8), nn.Identity()])
def test_refined_noise_has_the_gradient_of_the_unseen_images(norm):
    generator = seeded()
    model = small_model(norm)
    labels = torch.arange(12) % 3
    unseen, noise = (torch.randn(12, 1, 8, 8, generator=generator) for _ in range(2))
    target = cross_entropy_gradient(model, unseen + labels[:, None, None, None], labels)
    seen = []
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


@pytest.mark.parametrize(
    ("model", "target", "where"),
    [
        (nn.Linear(4, 3), {"bias": torch.zeros(3)}, "target"),
        (nn.Linear(4, 3), {"weight": torch.zeros(3, 5)}, "target['weight']"),
        (nn.Linear(4, 3), {"weight": torch.full((3, 4), torch.nan)}, "target['weight']"),
        (nn.BatchNorm1d(4), {}, "target"),
    ],
)
def test_targets_that_do_not_fit_are_refused(model, target, where):
    with pytest.raises(DistillError, check=at(where)):
        match_gradient(torch.randn(2, 4), torch.tensor([0, 1]), target, model)
