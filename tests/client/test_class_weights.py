"""Weights of classes in local training: their values, and what they do to what is learnt."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.utils.class_weight import compute_class_weight
from torch import nn
from torch.nn import functional

from flwr_distill.client.class_weights import class_weights, mean_loss
from flwr_distill.client.dp_sgd import PrivacyAccount, PrivateTraining
from flwr_distill.client.training import train_round
from flwr_distill.client.training_together import why_one_by_one
from flwr_distill.storage.store import NodeStore
from flwr_distill.task.datasets import Samples
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.settings import TrainSettings
from tests.distill.builders import seeded as generator
from tests.errors import at


def imbalanced(n=400):
    """Two classes that overlap, of which the second has a sample in ten."""
    labels = (torch.arange(n) % 10 == 0).long()
    inputs = torch.randn(n, 1, 1, 2, generator=generator(1))
    inputs[:, 0, 0, 0] += 1.2 * labels
    return Samples(inputs, labels)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(2, 2))


def recalls(trained, samples):
    with torch.no_grad():
        right = trained(samples.inputs).argmax(1) == samples.labels
    return [float(right[samples.labels == label].double().mean()) for label in (0, 1)]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=50))
def test_balanced_weights_are_scikit_learns_and_have_mean_1(labels):
    present = sorted(set(labels))
    weights = class_weights("balanced", torch.tensor(labels))
    wanted = compute_class_weight("balanced", classes=np.array(present), y=labels)
    assert weights[present].tolist() == pytest.approx(wanted.tolist())
    assert float(weights[labels].mean()) == pytest.approx(1)


def test_soft_labels_count_by_their_shares():
    soft = torch.tensor([[1.0, 0.0], [0.5, 0.5], [1.0, 0.0]])
    weights = class_weights("balanced", soft)
    assert weights.tolist() == pytest.approx([3 / (2 * 2.5), 3 / (2 * 0.5)])
    logits = torch.randn(3, 2, generator=generator())
    each = functional.cross_entropy(logits, soft, reduction="none")
    wanted = sum(float(soft[i] @ weights * each[i]) for i in range(3)) / 3
    assert float(mean_loss(logits, soft, weights)) == pytest.approx(wanted)


def test_stated_weights_multiply_the_loss_of_each_sample():
    logits, labels = torch.randn(5, 3, generator=generator()), torch.tensor([0, 2, 2, 1, 0])
    weights = class_weights("1,0.5,3", labels)
    each = functional.cross_entropy(logits, labels, reduction="none")
    wanted = (1 * each[0] + 3 * each[1] + 3 * each[2] + 0.5 * each[3] + 1 * each[4]) / 5
    assert float(mean_loss(logits, labels, weights)) == pytest.approx(float(wanted))
    plain = mean_loss(logits, labels, class_weights("none", labels))
    assert torch.equal(plain, functional.cross_entropy(logits, labels))


def test_a_label_without_a_stated_weight_is_named():
    with pytest.raises(SettingsError, check=at("train.class-weights", value="1,2")):
        class_weights("1,2", torch.tensor([0, 2]))


def test_balanced_weights_change_what_is_learnt_of_the_rare_class():
    samples, found = imbalanced(), {}
    for weights in ("none", "balanced", "1,9"):
        trained = model()
        settings = TrainSettings(lr=0.3, local_epochs=5, class_weights=weights)
        train_round(trained, samples, settings, generator())
        found[weights] = recalls(trained, samples)
    assert found["none"][1] < 0.4
    assert found["balanced"][1] > found["none"][1] + 0.3
    assert found["1,9"][1] > found["none"][1] + 0.3


def test_classes_that_are_drawn_evenly_get_no_balanced_weights():
    samples, weights = imbalanced(), {}
    for name in ("none", "balanced"):
        trained = model()
        settings = TrainSettings(local_epochs=1, class_weights=name)
        train_round(trained, samples, settings, generator(), balanced=True)
        weights[name] = trained[1].weight
    assert torch.equal(weights["none"], weights["balanced"])


def test_stated_weights_go_with_dp_sgd_which_clips_after_them(tmp_path):
    samples, found, clip = imbalanced(100), {}, 0.01
    for weights in ("0,0", "1,1000"):
        store = NodeStore.open(str(tmp_path / weights), 1, 1)
        account = PrivacyAccount(store, 1e-5, 0.0)
        private = PrivateTraining(1e-9, clip, account, generator())
        trained = model()
        start = copy.deepcopy(trained)
        stated = torch.tensor([float(part) for part in weights.split(",")])
        optimizer = torch.optim.SGD(trained.parameters(), lr=1.0)
        private.fit(trained, samples, optimizer, batch_size=100, steps=1, weights=stated)
        moved = [
            (a - b).detach() for a, b in zip(trained.parameters(), start.parameters(), strict=True)
        ]
        found[weights] = float(torch.cat([part.flatten() for part in moved]).norm())
    assert found["0,0"] < 1e-6
    assert 0 < found["1,1000"] <= clip * 1.001


def test_balanced_weights_follow_from_class_sizes_so_that_dp_sgd_refuses_them():
    with pytest.raises(SettingsError, check=at("dp-noise", value=1.0)):
        TrainSettings.checked({"class-weights": "balanced", "dp-noise": 1.0}, "run config")
    TrainSettings.checked({"class-weights": "1,2", "dp-noise": 1.0}, "run config")


@pytest.mark.parametrize("text", ["even", "", "1;2", "1,-2", "nan,1", "0,0", "1,1e9"])
def test_other_weights_are_refused(text):
    with pytest.raises(SettingsError, check=at("class-weights", value=text)):
        TrainSettings.checked({"class-weights": text}, "run config")


def test_nodes_with_weights_of_their_own_train_one_by_one():
    reason = why_one_by_one(model(), imbalanced(), TrainSettings(class_weights="balanced"))
    assert "weighs classes" in reason
