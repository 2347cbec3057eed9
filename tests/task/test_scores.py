"""Metrics from counts, against scikit-learn and direct sums over samples."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from sklearn.metrics import balanced_accuracy_score, f1_score, roc_auc_score
from torch import nn
from torch.nn import functional

from flwr_distill.task import evaluation
from flwr_distill.task.datasets import Samples
from flwr_distill.task.evaluation import add_counts, count
from flwr_distill.task.scores import (
    CALIBRATION_BINS,
    MAX_CLASSES,
    MAX_SHOWN,
    Counts,
    auroc,
    intervals,
    num_classes,
    scores,
    share_interval,
    size,
    summary,
)


def drawn(n, classes, seed=0, sure=1.0):
    """Logits that know something of the labels, and labels of which one class has few."""
    generator = torch.Generator().manual_seed(seed)
    shares = torch.arange(1, classes + 1).double()
    labels = torch.multinomial(shares, n, replacement=True, generator=generator)
    logits = torch.randn(n, classes, generator=generator)
    logits[torch.arange(n), labels] += 1
    return sure * logits, labels


def counts_of(logits, labels):
    total = torch.zeros(size(logits.shape[1]), dtype=torch.int64)
    add_counts(total, logits, labels)
    return Counts.from_vector(total.numpy(), logits.shape[1])


def same(one, other):
    return all((a == b).all() for a, b in zip(one.parts(), other.parts(), strict=True))


def half_of_ties(own, others):
    """How far the area is at most from that of exact probabilities."""
    return ((own * others).sum(-1) / 2 / (own.sum(-1) * others.sum(-1))).mean()


some = st.tuples(st.integers(1, 60), st.integers(2, 6), st.integers(0, 1000))


@pytest.mark.parametrize("sure", [0.3, 3.0, 30.0])
@pytest.mark.parametrize("classes", [2, 5])
def test_metrics_are_scikit_learns(classes, sure):
    logits, labels = drawn(400, classes, sure=sure)
    counts = counts_of(logits, labels)
    found = scores(counts)
    predicted, probabilities = logits.argmax(1).numpy(), logits.double().softmax(1).numpy()
    assert found["accuracy"] == pytest.approx((predicted == labels.numpy()).mean())
    assert found["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(labels, predicted))
    assert found["macro_f1"] == pytest.approx(f1_score(labels, predicted, average="macro"))
    exact = np.mean([roc_auc_score(labels == c, probabilities[:, c]) for c in range(classes)])
    bound = half_of_ties(counts.own.astype(float), counts.others)
    assert abs(found["auroc"] - exact) <= bound + 1e-12
    if sure < 30:  # with such logits many samples lie beyond the bins
        assert abs(found["auroc"] - exact) < 0.005
    if sure == 3:
        assert bound < 0.02


def test_the_calibration_error_is_that_of_a_sum_over_samples():
    logits, labels = drawn(500, 4, sure=2.0)
    confidence, predicted = logits.double().softmax(1).max(1)
    error = 0.0
    for low in range(CALIBRATION_BINS):
        inside = (confidence * CALIBRATION_BINS).long().clamp(max=CALIBRATION_BINS - 1) == low
        if inside.any():
            right = (predicted == labels)[inside].double().mean()
            error += float(inside.double().mean() * (confidence[inside].mean() - right).abs())
    # Confidences are rounded to thousandths.
    assert scores(counts_of(logits, labels))["ece"] == pytest.approx(error, abs=5e-4)


@given(some, some)
def test_counts_of_two_sets_add_up_to_those_of_their_union(one, other):
    classes = one[1]
    parts = [drawn(one[0], classes, one[2]), drawn(other[0], classes, other[2])]
    union = counts_of(*(torch.cat(pair) for pair in zip(*parts, strict=True)))
    total = counts_of(*parts[0]) + counts_of(*parts[1])
    assert same(total, union)
    assert total.samples == one[0] + other[0]
    total.check()


@given(some)
def test_another_order_of_the_classes_changes_no_metric(case):
    n, classes, seed = case
    logits, labels = drawn(n, classes, seed)
    order = torch.randperm(classes, generator=torch.Generator().manual_seed(seed))
    renamed = counts_of(logits[:, order], torch.argsort(order)[labels])
    found = scores(counts_of(logits, labels))
    assert scores(renamed) == pytest.approx(found, nan_ok=True)


@given(some)
def test_another_order_of_the_samples_changes_no_count_and_a_vector_has_them_all(case):
    n, classes, seed = case
    logits, labels = drawn(n, classes, seed)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    counts = counts_of(logits, labels)
    assert same(counts_of(logits[order], labels[order]), counts)
    assert num_classes(len(counts.to_vector())) == classes
    assert same(Counts.from_vector(counts.to_vector(), classes), counts)


@given(some)
def test_metrics_and_intervals_are_shares(case):
    counts = counts_of(*drawn(*case))
    values = [value for value in scores(counts).values() if not np.isnan(value)]
    bounds = intervals(counts, np.random.default_rng(0), resamples=20)
    values += [x for pair in bounds.values() for x in pair if not np.isnan(x)]
    assert all(0 <= value <= 1 for value in values)
    assert all(not low > high for low, high in bounds.values())


def test_classes_without_samples_are_left_out():
    logits, labels = drawn(200, 4)
    keep = labels != 2
    logits, labels = logits[keep], labels[keep]
    found, predicted = scores(counts_of(logits, labels)), logits.argmax(1)
    present = [0, 1, 3]
    f1 = f1_score(labels, predicted, labels=present, average="macro")
    assert found["macro_f1"] == pytest.approx(f1)
    recalls = [float((predicted[labels == c] == c).double().mean()) for c in present]
    assert found["balanced_accuracy"] == pytest.approx(np.mean(recalls))
    probabilities = logits.double().softmax(1)
    exact = np.mean([roc_auc_score(labels == c, probabilities[:, c]) for c in present])
    assert found["auroc"] == pytest.approx(exact, abs=0.02)


def test_a_single_class_has_no_auroc_and_a_model_that_broke_has_counts():
    logits, labels = torch.full((7, 3), float("nan")), torch.zeros(7, dtype=torch.int64)
    logits[0] = torch.tensor([float("inf"), 0.0, 0.0])
    counts = counts_of(logits, labels)
    counts.check()
    assert counts.samples == 7
    found = summary(counts, np.random.default_rng(0))
    assert found["auroc"] is None
    assert "auroc" not in found["intervals"]


def test_ties_count_half():
    own, others = np.zeros((1, 4), int), np.zeros((1, 4), int)
    own[0, 1], others[0, 0], others[0, 1], others[0, 2] = 2, 3, 4, 5
    assert auroc(own, others) == pytest.approx((3 + 4 / 2) / 12)
    assert half_of_ties(own, others) == pytest.approx((4 / 2) / 12)


def test_intervals_are_as_wide_as_those_of_resampled_samples():
    logits, labels = drawn(300, 3, sure=2.0)
    bounds = intervals(counts_of(logits, labels), np.random.default_rng(1), resamples=1000)
    generator = torch.Generator().manual_seed(2)
    again = []
    for _ in range(1000):
        rows = torch.randint(300, (300,), generator=generator)
        again.append(scores(counts_of(logits[rows], labels[rows])))
    for name, (low, high) in bounds.items():
        wanted = np.quantile([found[name] for found in again], [0.025, 0.975])
        assert (low, high) == pytest.approx(wanted, abs=0.015), name


def test_intervals_are_the_same_each_time_and_hold_the_truth_as_often_as_they_say():
    counts = counts_of(*drawn(100, 2))
    first, second = (intervals(counts, np.random.default_rng(3)) for _ in range(2))
    assert first == second
    truth = scores(counts_of(*drawn(100_000, 2, seed=9)))["balanced_accuracy"]
    inside = 0
    for seed in range(100):
        own = intervals(counts_of(*drawn(150, 2, seed)), np.random.default_rng(seed))
        low, high = own["balanced_accuracy"]
        inside += low <= truth <= high
    assert 87 <= inside <= 100


@pytest.mark.parametrize(
    ("classes", "has_matrix", "has_intervals"),
    [(MAX_SHOWN, True, True), (MAX_SHOWN + 1, False, True), (MAX_CLASSES + 1, False, False)],
)
def test_a_summary_of_many_classes_has_no_matrix_and_then_no_intervals(
    classes, has_matrix, has_intervals
):
    found = summary(counts_of(*drawn(300, classes)), np.random.default_rng(0))
    assert (found["confusion"] is not None) == has_matrix
    assert bool(found["intervals"]) == has_intervals
    assert 0 < found["auroc"] < 1


@pytest.mark.parametrize("at_once", [1, 64 * 3, 300, 10**6])
def test_a_model_is_counted_in_batches_as_at_once(at_once, monkeypatch):
    monkeypatch.setattr(evaluation, "COUNTED", at_once)
    torch.manual_seed(0)
    inputs, labels = torch.randn(150, 1, 2, 2), torch.randint(0, 3, (150,))
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).eval()
    counts, loss = count(model, Samples(inputs, labels))
    with torch.no_grad():
        logits = model(inputs)
    assert same(counts, counts_of(logits, labels))
    assert loss == pytest.approx(float(functional.cross_entropy(logits, labels)), rel=1e-5)


def changed(counts, part, place, by):
    arrays = {name: array.copy() for name, array in vars(counts).items()}
    arrays[part][place] += by
    return Counts(**arrays)


@pytest.mark.parametrize(
    ("part", "place", "by"),
    [
        ("confusion", (0, 0), -1000),
        ("confusion", (0, 1), 1),
        ("own", (0, 5), 1),
        ("others", (1, 5), 1),
        ("calibration", (0, 7), 1),
        ("calibration", (2, 7), 1),
        ("calibration", (1, 7), 10**6),
        ("calibration", (1, 12), 10**18),
    ],
)
def test_counts_that_cannot_be_of_samples_are_refused(part, place, by):
    counts = counts_of(*drawn(100, 3))
    counts.check()
    with pytest.raises(ValueError, match=r"negative|add up|more confidence"):
        changed(counts, part, place, by).check()


def test_a_confusion_matrix_may_be_known_alone():
    counts = Counts.of_confusion(np.array([[3, 1], [0, 4]]))
    counts.check()
    found = scores(counts)
    assert found["balanced_accuracy"] == pytest.approx(7 / 8)
    assert np.isnan(found["auroc"])
    assert np.isnan(found["ece"])


@pytest.mark.parametrize(("hits", "samples"), [(0, 5), (3, 7), (50, 50), (999, 1000)])
def test_the_interval_of_a_share_is_wilsons(hits, samples):
    known = binomtest(hits, samples).proportion_ci(method="wilson")
    assert share_interval(hits / samples, samples) == pytest.approx((known.low, known.high))
