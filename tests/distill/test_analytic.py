"""Heads in closed form: scikit-learn on all samples as the oracle, sums however they are split."""

from functools import reduce
from operator import add

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from sklearn.covariance import oas
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge

from flwr_distill.distill.analytic import (
    STRENGTHS,
    Sums,
    best_penalty,
    best_shrinkage,
    deviations,
    discriminant,
    noisy_penalty,
    random_directions,
    ridge,
)
from tests.distill.builders import seeded

CLASSES = 4


def samples(n=200, d=6, seed=0):
    draws = np.random.default_rng(seed)
    labels = draws.integers(CLASSES, size=n)
    labels[:CLASSES] = range(CLASSES)
    features = draws.standard_normal((n, d)) + draws.standard_normal((CLASSES, d))[labels]
    return features / np.linalg.norm(features, axis=1).max(), labels


def residuals_without_one(x, y, penalty):
    """Errors on each sample of the head of the others, naively."""
    heads = [Ridge(penalty).fit(np.delete(x, i, 0), np.delete(y, i, 0)) for i in range(len(x))]
    return np.array([y[i] - head.predict(x[i : i + 1])[0] for i, head in enumerate(heads)])


@pytest.mark.parametrize("penalty", [0.01, 10.0])
def test_ridge_is_scikit_learns_on_all_samples(penalty):
    x, labels = samples()
    oracle = Ridge(penalty).fit(x, np.eye(CLASSES)[labels])
    head = ridge(Sums.of(x, labels, CLASSES), penalty)
    assert_allclose(head.weight, oracle.coef_, atol=1e-10)
    assert_allclose(head.bias, oracle.intercept_, atol=1e-10)


def test_discriminant_is_scikit_learns_on_all_samples():
    x, labels = samples()
    oracle = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.3).fit(x, labels)
    head = discriminant(Sums.of(x, labels, CLASSES), 0.3)
    assert_allclose(head.weight, oracle.coef_, atol=1e-8)
    assert_allclose(head.bias, oracle.intercept_, atol=1e-8)


def test_shrinkage_is_scikit_learns_oracle_approximation():
    x, labels = samples(n=40, d=12)
    means = np.stack([x[labels == c].mean(0) for c in range(CLASSES)])
    _, shrinkage = oas(x - means[labels], assume_centered=True)
    assert best_shrinkage(Sums.of(x, labels, CLASSES)) == pytest.approx(shrinkage)


def test_the_chosen_penalty_is_near_the_one_that_leave_one_out_would_choose():
    x, labels = samples(n=30, d=20)
    sums = Sums.of(x, labels, CLASSES)
    y = np.eye(CLASSES)[labels]
    top = np.linalg.eigvalsh((x - x.mean(0)).T @ (x - x.mean(0)))[-1]
    errors = [np.square(residuals_without_one(x, y, s * top)).sum() for s in STRENGTHS[::4]]
    chosen = np.abs(np.log(STRENGTHS * top / best_penalty(sums))).argmin()
    assert abs(chosen - 4 * int(np.argmin(errors))) <= 4


def test_fewer_samples_than_features_still_give_a_penalised_head():
    x, labels = samples(n=12, d=30)
    sums = Sums.of(x, labels, CLASSES)
    head = ridge(sums, best_penalty(sums))
    assert np.isfinite(head.weight).all()
    assert np.abs(head.weight).max() < 10


@pytest.mark.parametrize("n", [1, 2, 40])
@pytest.mark.parametrize("length", [0.0, 0.3, 1.0])
def test_samples_that_are_all_alike_have_the_head_of_the_commonest_class(n, length):
    x = np.random.default_rng(0).standard_normal(8)
    x *= length / np.linalg.norm(x)
    labels = np.arange(n) % 3 % 2
    sums = Sums.of(np.tile(x, (n, 1)), labels, CLASSES)
    head = ridge(sums, best_penalty(sums))
    assert_allclose(head.weight, 0, atol=1e-6)
    assert_allclose(head.weight @ x + head.bias, np.bincount(labels, minlength=CLASSES) / n)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 4), min_size=60, max_size=60), st.randoms(use_true_random=False))
def test_any_split_of_the_samples_gives_the_same_sums_and_heads(owners, order):
    x, labels = samples(n=60)
    nodes = [np.array(owners) == node for node in set(owners)]
    order.shuffle(nodes)
    split = reduce(add, (Sums.of(x[own], labels[own], CLASSES) for own in nodes))
    whole = Sums.of(x, labels, CLASSES)
    for name in ("gram", "by_class", "counts"):
        assert_allclose(getattr(split, name), getattr(whole, name), atol=1e-12)
    assert_allclose(ridge(split, 1.0).weight, ridge(whole, 1.0).weight, atol=1e-10)
    assert_allclose(discriminant(split, 0.1).bias, discriminant(whole, 0.1).bias, atol=1e-9)


def test_a_head_on_a_projection_is_a_head_on_the_features():
    x, labels = samples(d=20)
    directions = random_directions(20, 8, seed=3)
    head = ridge(Sums.of(x @ directions, labels, CLASSES), 0.1)
    whole = head.of_projection(directions)
    assert_allclose(x @ whole.weight.T, (x @ directions) @ head.weight.T, atol=1e-12)


def test_a_class_that_nobody_holds_is_never_the_answer():
    x, labels = samples()
    sums = Sums.of(x, labels, CLASSES + 1)
    for head in (ridge(sums, 0.1), discriminant(sums, 0.1)):
        assert CLASSES not in (x @ head.weight.T + head.bias).argmax(1)


def test_sums_of_any_samples_pass_the_check():
    for seed in range(5):
        x, labels = samples(n=4 + seed, d=12, seed=seed)
        narrow = (part.astype(np.float32).astype(np.float64) for part in vars_of(x, labels))
        Sums(*narrow).check(1.0)


def vars_of(x, labels):
    sums = Sums.of(x, labels, CLASSES)
    return sums.gram, sums.by_class, sums.counts


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda g, s, n: (g, s, np.ones(CLASSES)), "longer than 1"),
        (lambda g, s, n: (g, s, n / 2.5), "counts are not numbers of samples"),
        (lambda g, s, n: (g, s, -n), "counts are not numbers of samples"),
        (lambda g, s, n: (g, s, 0 * n), "counts are not numbers of samples"),
        (lambda g, s, n: (100 * g, 10 * s, n), "longer than 1"),
        (lambda g, s, n: (g, 3 * s, n), "no samples have these sums"),
        (lambda g, s, n: (-g, s, n), "no samples have these sums"),
        (lambda g, s, n: (0.2 * g, s, n), "no samples have these sums"),
        (lambda g, s, n: (g, s, n * (np.arange(CLASSES) > 0)), "of which it has no sample"),
    ],
)
def test_sums_that_no_samples_have_are_refused(spoil, reason):
    x, labels = samples()
    with pytest.raises(ValueError, match=reason):
        Sums(*spoil(*vars_of(x, labels))).check(1.0)


def test_one_sample_moves_noisy_sums_by_one_deviation_at_most():
    x, labels = samples(n=30, d=5)
    x /= np.linalg.norm(x, axis=1, keepdims=True)  # all as long as they may be
    noise = 1.7
    of_gram, of_classes, of_counts = deviations(1.0, noise)
    whole = Sums.of(x, labels, CLASSES)
    for left_out in range(5):
        rest = Sums.of(np.delete(x, left_out, 0), np.delete(labels, left_out), CLASSES)
        # the diagonal, and above it half the variance: the whole matrix once
        moved = np.linalg.norm(whole.gram - rest.gram) / of_gram
        classes = np.linalg.norm(whole.by_class - rest.by_class) / of_classes
        counts = np.linalg.norm(whole.counts - rest.counts) / of_counts
        assert np.hypot(np.hypot(moved, classes), counts) == pytest.approx(1 / noise)


def test_noise_is_as_large_as_it_is_said_to_be():
    zero = Sums(np.zeros((200, 200)), np.zeros((50, 200)), np.zeros(5000))
    noisy = zero.with_noise(2.0, 1.5, seeded())
    of_gram, of_classes, of_counts = deviations(2.0, 1.5)
    upper = noisy.gram[np.triu_indices(200, 1)]
    assert_allclose(noisy.gram, noisy.gram.T)
    assert np.diag(noisy.gram).std() == pytest.approx(of_gram, rel=0.2)
    assert upper.std() == pytest.approx(of_gram / np.sqrt(2), rel=0.05)
    assert noisy.by_class.std() == pytest.approx(of_classes, rel=0.05)
    assert noisy.counts.std() == pytest.approx(of_counts, rel=0.05)
    largest = np.abs(np.linalg.eigvalsh(noisy.gram)).max()
    assert largest < noisy_penalty(200, of_gram) < 3 * largest
    noisy.check_noisy(0, 2.0, 1.5)
    with pytest.raises(ValueError, match="class sums are larger than those of 0 samples"):
        Sums(noisy.gram, 3 * noisy.by_class, noisy.counts).check_noisy(0, 2.0, 1.5)
