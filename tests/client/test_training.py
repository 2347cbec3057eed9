"""Local training, against plain PyTorch loops."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from flwr_distill.client.terms import Proximal
from flwr_distill.client.training import epoch_batches, fit, soft_labels, train_round
from flwr_distill.task.augmentation import Augment, augmented
from flwr_distill.task.datasets import Samples
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.settings import CHANGES, TrainSettings
from tests.distill.builders import seeded as generator
from tests.errors import at


@pytest.fixture
def samples():
    labels = torch.tensor([0] * 30 + [1] * 10 + [2] * 5)
    return Samples(torch.randn(45, 1, 4, 4, generator=generator(1)), labels)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


@given(st.integers(1, 50), st.integers(1, 20), st.integers(0, 100))
def test_an_epoch_shows_every_sample_but_one_that_would_be_alone_in_its_batch(n, size, seed):
    shown = torch.cat(list(epoch_batches(torch.zeros(n), size, generator(seed)))).tolist()
    assert len(set(shown)) == len(shown)
    lonely = n % size == 1 and 1 not in (n, size)  # BatchNorm cannot train on a batch of one
    assert n - len(shown) == lonely


@given(st.integers(1, 50), st.integers(1, 20), st.integers(0, 100))
def test_an_epoch_without_its_last_part_is_whole_minibatches_of_the_same_order(n, size, seed):
    labels = torch.zeros(n)
    batches = list(epoch_batches(labels, size, generator(seed), drop_last=True))
    every = list(epoch_batches(labels, size, generator(seed)))
    assert [b.tolist() for b in batches] == [b.tolist() for b in every[: max(n // size, 1)]]
    assert {len(batch) for batch in batches} == {min(n, size)}


def test_a_round_drops_the_last_part_where_the_settings_say_so(samples, model):
    steps = {
        drop: train_round(
            copy.deepcopy(model),
            samples,
            TrainSettings(batch_size=len(samples) - 3, local_epochs=2, drop_last=drop),
            generator(),
        ).steps
        for drop in (False, True)
    }
    assert steps == {False: 4, True: 2}


@pytest.mark.parametrize(("number", "size", "where"), [(9, 1, "train.batch-size"), (1, 8, "model")])
def test_batch_norm_on_single_samples_is_an_error_with_what_makes_them_single(
    samples, number, size, where
):
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.BatchNorm1d(3))
    settings = TrainSettings(batch_size=size, local_epochs=1)
    with pytest.raises(SettingsError, match="batch normalisation", check=at(where)):
        train_round(model, samples.subset(range(number)), settings, generator(1))


def test_a_balanced_epoch_shows_each_class_equally_often_in_whole_minibatches():
    labels = torch.tensor([0] * 3000 + [1] * 300 + [5] * 30)
    batches = list(epoch_batches(labels, 64, generator(), balanced=True))
    counts = torch.bincount(labels[torch.cat(batches)])[[0, 1, 5]]
    assert [len(batch) for batch in batches] == [64] * 53  # a step on the last 2 could spoil all
    assert (counts / counts.sum() - 1 / 3).abs().max() < 0.04


def test_fit_takes_the_same_steps_as_a_plain_loop(samples, model):
    batches = list(epoch_batches(samples.labels, 8, generator()))
    expected = copy.deepcopy(model)
    losses, right = [], []
    for batch in batches:
        logits, labels = expected(samples.inputs[batch]), samples.labels[batch]
        loss = functional.cross_entropy(logits, labels)
        right.append(
            sum(row.argmax() == y for row, y in zip(logits, labels, strict=True)) / len(batch)
        )
        gradients = torch.autograd.grad(loss, list(expected.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(expected.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
        losses.append(loss.item())
    trained = fit(model, samples, batches, torch.optim.SGD(model.parameters(), lr=0.1))
    assert trained.steps == len(batches)
    assert trained.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert trained.accuracy == pytest.approx(sum(right) / len(right))
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_proximal_term_is_half_mu_times_the_squared_distance_to_the_start(samples, model):
    mu, batches = 0.7, list(epoch_batches(samples.labels, 8, generator()))[:3]
    expected, start = copy.deepcopy(model), copy.deepcopy(model)
    for batch in batches:
        loss = functional.cross_entropy(expected(samples.inputs[batch]), samples.labels[batch])
        for weight, origin in zip(expected.parameters(), start.parameters(), strict=True):
            loss = loss + mu / 2 * ((weight - origin.detach()) ** 2).sum()
        gradients = torch.autograd.grad(loss, list(expected.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(expected.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fit(model, samples, batches, optimizer, [Proximal(model, mu)])
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_same_generator_state_gives_the_same_model_bit_for_bit(samples, model):
    settings = TrainSettings(local_epochs=2, batch_size=8)
    twin = copy.deepcopy(model)
    train_round(model, samples, settings, generator(5))
    train_round(twin, samples, settings, generator(5))
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_round_runs_the_local_epochs_that_the_settings_ask_for(samples, model, optimizer):
    settings = TrainSettings(optimizer=optimizer, lr=0.05, local_epochs=60, batch_size=8)
    first = train_round(copy.deepcopy(model), samples, TrainSettings(batch_size=8), generator())
    assert train_round(model, samples, settings, generator()).loss < 0.7 * first.loss


@pytest.mark.parametrize(("optimizer", "momentum"), [("sgd", 0.0), ("sgd", 0.9), ("adam", 0.0)])
def test_weight_decay_pulls_every_step_towards_zero(samples, model, optimizer, momentum):
    """Whole batches, so that each of the three epochs is one step, in whatever order."""
    lr, decay = 0.05, 0.3
    settings = TrainSettings(
        optimizer=optimizer, lr=lr, momentum=momentum, weight_decay=decay, local_epochs=3,
        batch_size=len(samples),
    )  # fmt: skip
    expected = copy.deepcopy(model)
    first = [torch.zeros_like(p) for p in expected.parameters()]
    second = [torch.zeros_like(p) for p in expected.parameters()]
    for step in (1, 2, 3):
        loss = functional.cross_entropy(expected(samples.inputs), samples.labels)
        parameters = list(expected.parameters())
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for i, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
                slope = gradient + decay * parameter
                if optimizer == "sgd":
                    first[i] = momentum * first[i] + slope
                    parameter -= lr * first[i]
                else:
                    first[i] = 0.9 * first[i] + 0.1 * slope
                    second[i] = 0.999 * second[i] + 0.001 * slope**2
                    deviation = (second[i] / (1 - 0.999**step)).sqrt() + 1e-8
                    parameter -= lr * first[i] / (1 - 0.9**step) / deviation
    train_round(model, samples, settings, generator())
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


class Noting(nn.Module):
    """Notes the minibatches that it is shown, as rows of pixels."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.shown = []

    def forward(self, inputs):
        self.shown.append([tuple(row) for row in inputs.flatten(1).tolist()])
        return self.model(inputs)


@pytest.mark.parametrize(("share", "last"), [(0.25, 3), (0.01, 1), (1.0, 12)])
def test_weights_are_averaged_over_the_last_steps_of_a_round(samples, model, share, last):
    settings = TrainSettings(lr=0.3, momentum=0.9, batch_size=8, local_epochs=2)
    expected, order = copy.deepcopy(model), generator()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.3, momentum=0.9)
    weights = []
    for _ in range(2):
        for batch in epoch_batches(samples.labels, 8, order):
            optimizer.zero_grad()
            functional.cross_entropy(
                expected(samples.inputs[batch]), samples.labels[batch]
            ).backward()
            optimizer.step()
            weights.append([w.detach().clone() for w in expected.parameters()])
    assert len(weights) == 12
    trained = train_round(model, samples, settings, generator(), average_last=share)
    assert trained.steps == 12
    for own, steps in zip(model.parameters(), zip(*weights[-last:], strict=True), strict=True):
        torch.testing.assert_close(own.detach(), torch.stack(steps).mean(0))


def test_each_epoch_of_a_round_shows_every_sample_once_in_minibatches_of_its_own(samples, model):
    noting = Noting(model)
    train_round(noting, samples, TrainSettings(local_epochs=3, batch_size=9), generator())
    assert [len(batch) for batch in noting.shown] == [9] * 15
    epochs = [noting.shown[start : start + 5] for start in (0, 5, 10)]
    everything = sorted(tuple(row) for row in samples.inputs.flatten(1).tolist())
    for epoch in epochs:
        assert sorted(row for batch in epoch for row in batch) == everything
    drawn = {frozenset(batch) for epoch in epochs for batch in epoch}
    assert len(drawn) == 15
    in_order = [tuple(row) for row in samples.inputs[:9].flatten(1).tolist()]
    assert epochs[0][0] != in_order


def test_with_changes_every_showing_of_a_sample_is_another_image_with_its_own_label(samples):
    settings = TrainSettings(local_epochs=2, batch_size=9, lr=0.01)
    plain, changed = (Noting(nn.Sequential(nn.Flatten(), nn.Linear(16, 3))) for _ in range(2))
    marked = Samples(samples.inputs, torch.arange(45) % 3)
    train_round(plain, marked, settings, generator())
    train_round(changed, marked, settings, generator(), changes=("shift", "rotate"))
    shown = {row for batch in changed.shown for row in batch}
    assert len(shown) == 2 * 45
    assert not shown & {row for batch in plain.shown for row in batch}


def test_changes_are_drawn_from_the_generator_of_the_order_after_each_minibatch(samples, model):
    settings = TrainSettings(local_epochs=2, batch_size=9, lr=0.1)
    expected, draws = copy.deepcopy(model), generator(3)
    augment = Augment(CHANGES, draws)
    for _ in range(2):
        for batch in torch.randperm(45, generator=draws).split(9):
            inputs = augmented(samples.inputs[batch], CHANGES, augment.draw(9))
            loss = functional.cross_entropy(expected(inputs), samples.labels[batch])
            gradients = torch.autograd.grad(loss, list(expected.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(expected.parameters(), gradients, strict=True):
                    parameter -= 0.1 * gradient
    train_round(model, samples, settings, generator(3), changes=CHANGES)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_loss_terms_see_the_changed_images(samples, model):
    seen = []

    def term(inputs, labels, logits):
        seen.append(torch.equal(logits, model(inputs)))
        return logits.sum() * 0

    settings = TrainSettings(local_epochs=1, batch_size=9)
    train_round(model, samples, settings, generator(), changes=("shift",), terms=[term])
    assert seen == [True] * 5


def test_label_knowledge_is_a_distribution_over_classes_that_knows_the_own_class(samples, model):
    own = samples.subset(torch.arange(30))  # class 0 alone
    auxiliary = torch.randn(20, 1, 4, 4, generator=generator(2))
    soft = soft_labels(
        model, own, auxiliary, steps=50, lr=0.1, batch_size=64, generator=generator()
    )
    assert soft.shape == (20, 3)
    torch.testing.assert_close(soft.sum(dim=1), torch.ones(20))
    assert soft[:, 0].mean() > 0.6
