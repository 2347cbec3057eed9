"""The supervised contrastive loss: a double loop over anchors and positives gives the same."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_distill.distill.contrastive import supervised_contrastive_loss
from tests.distill.builders import seeded


def naive(features, labels, temperature):
    """The paper's double sum, one anchor and one positive after the other."""
    unit = [[x / math.hypot(*row) for x in row] for row in features.double().tolist()]
    classes, losses = labels.tolist(), []

    def exponent(j, a):
        return sum(p * q for p, q in zip(unit[j], unit[a], strict=True)) / temperature

    for j, anchor in enumerate(classes):
        positives = [p for p, other in enumerate(classes) if other == anchor and p != j]
        if not positives:
            continue
        all_others = sum(math.exp(exponent(j, a)) for a in range(len(classes)) if a != j)
        total = sum(math.log(math.exp(exponent(j, p)) / all_others) for p in positives)
        losses.append(-total / len(positives))
    return sum(losses) / len(losses) if losses else 0.0


@given(st.integers(2, 12), st.integers(1, 4), st.sampled_from([0.07, 0.5]), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_the_loss_is_the_papers_double_sum(n, num_classes, temperature, seed):
    generator = seeded(seed)
    features = torch.randn(n, 5, generator=generator)
    labels = torch.randint(num_classes, (n,), generator=generator)
    found = float(supervised_contrastive_loss(features, labels, temperature))
    assert found == pytest.approx(naive(features, labels, temperature), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("labels", [[0], [0, 1, 2]])
def test_without_two_samples_of_a_class_there_is_nothing_to_learn(labels):
    features = torch.eye(3, 4)[: len(labels)].requires_grad_()
    loss = supervised_contrastive_loss(features, torch.tensor(labels))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(features.grad, torch.zeros_like(features))


def test_features_of_zero_have_a_finite_loss_and_slope():
    features = torch.zeros(4, 3, requires_grad=True)
    loss = supervised_contrastive_loss(features, torch.tensor([0, 0, 1, 1]))
    loss.backward()
    assert loss.isfinite()
    assert features.grad.isfinite().all()
