"""Trajectory matching: its steps are those of plain SGD, and virtual data come to lead the way."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from flwr_distill.distill import DistillError
from flwr_distill_baselines.dynafed import trajectory_matching
from flwr_distill_baselines.dynafed.trajectory_matching import (
    draw_target,
    match_trajectory,
    sgd_step,
    squared_distance,
)
from tests.distill.builders import seeded

SHAPE = (1, 4, 4)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 3))


def weights_of(model):
    return {name: w.detach().clone() for name, w in model.named_parameters()}


def trained(num_models, epochs=5):
    """Global models of a run on three classes that differ by their mean."""
    torch.manual_seed(1)
    labels = torch.arange(60) % 3
    images = torch.randn(3, 1, 4, 4)[labels] + 0.3 * torch.randn(60, 1, 4, 4)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    models = [weights_of(model)]
    for _ in range(num_models - 1):
        for _ in range(epochs):
            optimizer.zero_grad()
            functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        models.append(weights_of(model))
    return models


def test_steps_are_those_of_plain_sgd_on_soft_labels():
    model, images, logits = network(), torch.randn(5, *SHAPE), torch.randn(5, 3)
    weights = weights_of(model)
    for _ in range(3):
        weights = sgd_step(model, weights, images, logits, torch.tensor(0.2))
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.2)
    soft = logits.exp() / logits.exp().sum(1, keepdim=True)
    for _ in range(3):
        optimizer.zero_grad()
        (-(soft * plain(images).log_softmax(1)).sum() / 5).backward()
        optimizer.step()
    for name, expected in plain.named_parameters():
        torch.testing.assert_close(weights[name], expected)


@pytest.mark.parametrize("which", ["images", "labels", "size"])
def test_the_distance_reached_has_the_slope_of_finite_differences(which):
    """By images, labels and learning rate, through all steps."""
    model = network().double()
    start, target = weights_of(model), weights_of(network(seed=5).double())
    learned = {
        "images": torch.randn(2, *SHAPE, dtype=torch.float64),
        "labels": torch.randn(2, 3, dtype=torch.float64),
        "size": torch.tensor(0.3, dtype=torch.float64),
    }

    def distance(changed):
        made = {**learned, which: changed}
        weights = start
        for _ in range(2):
            weights = sgd_step(model, weights, made["images"], made["labels"], made["size"])
        return squared_distance(weights, target)

    value = learned[which].clone().requires_grad_()
    (slope,) = torch.autograd.grad(distance(value), value)
    direction = torch.randn(value.shape, dtype=torch.float64)
    eps = 1e-5
    base = learned[which]
    difference = distance(base + eps * direction) - distance(base - eps * direction)
    expected = float(difference.detach() / (2 * eps))
    assert float((slope * direction).sum()) == pytest.approx(expected, rel=1e-6)


def test_a_target_is_the_mean_of_two_or_three_of_the_next_three_models():
    models = [{"w": torch.tensor([2.0**i])} for i in range(6)]
    generator = seeded()
    starts, targets = set(), set()
    for _ in range(300):
        start, target = draw_target(models, generator)
        at = models.index(start)
        ahead = [float(models[at + k]["w"]) for k in (1, 2, 3)]
        possible = {(a + b) / 2 for a in ahead for b in ahead}
        possible |= {(a + b + c) / 3 for a in ahead for b in ahead for c in ahead}
        assert min(abs(float(target["w"]) - value) for value in possible) < 1e-4
        starts.add(at)
        targets.add(float(target["w"]))
    assert starts == {0, 1, 2}
    assert len(targets) > 20


def test_learned_data_lead_from_a_model_to_later_ones():
    models, distances = trained(6), []
    virtual = match_trajectory(
        models,
        network(),
        SHAPE,
        3,
        per_class=2,
        steps=150,
        follow_steps=5,
        generator=seeded(),
        progress=lambda step, steps, distance: distances.append(distance),
    )
    assert len(distances) == 150
    assert sum(distances[-20:]) < 0.7 * sum(distances[:20])
    assert virtual.images.shape == (6, *SHAPE)
    torch.testing.assert_close(virtual.soft_labels.sum(1), torch.ones(6))
    assert torch.equal(virtual.labels, virtual.soft_labels.argmax(1))


def made(models, steps=2):
    draws = seeded(3)
    return match_trajectory(
        models, network(), SHAPE, 3, per_class=2, steps=steps, follow_steps=2, generator=draws
    )


def test_one_seed_gives_one_result_and_the_models_stay_as_they_are():
    models = trained(3)
    before = copy.deepcopy(models)
    one, other = made(models), made(models)
    assert torch.equal(one.images, other.images)
    assert torch.equal(one.soft_labels, other.soft_labels)
    for point, kept in zip(models, before, strict=True):
        assert all(torch.equal(point[name], kept[name]) for name in kept)


def test_two_models_are_enough_and_one_is_not():
    assert len(made(trained(2))) == 6
    with pytest.raises(DistillError, match="needs two models or more, got 1"):
        made(trained(1))


def test_models_that_never_move_cannot_be_followed():
    with pytest.raises(DistillError, match="all alike"):
        made([weights_of(network())] * 4)


def test_steps_that_go_to_infinity_give_an_error_and_no_data(monkeypatch):
    monkeypatch.setattr(trajectory_matching, "STEP_SIZE", 1e30)
    with pytest.raises(DistillError, match="finite"):
        made(trained(3), steps=3)
