"""The membership attack: equal to plain loops, blind where nothing leaks, and not where it does."""

import numpy as np
import pytest
import torch
from scipy.special import softmax
from scipy.stats import binomtest, norm
from torch import nn
from torch.nn import functional

from flwr_distill.distill.membership import (
    auc,
    balanced_halves,
    curve,
    least_epsilon,
    left_out_scores,
    logit_confidence,
    membership_scores,
    share_bounds,
    true_positives_at,
)


def test_each_sample_is_in_half_of_the_models_and_halves_differ():
    halves = balanced_halves(8, 300, np.random.default_rng(0))
    assert (halves.sum(axis=0) == 4).all()
    assert 100 < halves[0].sum() < 200
    assert len({half.tobytes() for half in halves}) == 8


def test_confidence_is_the_logit_of_the_true_classs_probability():
    generator = np.random.default_rng(0)
    logits, labels = generator.normal(size=(20, 5)), generator.integers(5, size=20)
    p = softmax(logits, axis=1)[np.arange(20), labels]
    np.testing.assert_allclose(logit_confidence(logits, labels), np.log(p / (1 - p)))


def test_confidence_of_a_certain_model_is_finite():
    logits = np.array([[800.0, 0.0, -5.0]])
    assert logit_confidence(logits, np.array([0]))[0] == pytest.approx(800 - np.log1p(np.exp(-5)))


def test_scores_are_the_likelihood_ratio_of_two_normal_distributions():
    generator = np.random.default_rng(1)
    trained_on = balanced_halves(6, 9, generator)
    confidences, observed = generator.normal(size=(6, 9)), generator.normal(size=9)

    def means_and_deviation(which):
        means = [confidences[which[:, k], k].mean() for k in range(9)]
        squares = [(c - means[k]) ** 2 for k in range(9) for c in confidences[which[:, k], k]]
        return means, (sum(squares) / (len(squares) - 9)) ** 0.5

    (inside, s_in), (outside, s_out) = map(means_and_deviation, (trained_on, ~trained_on))
    expected = [
        norm.logpdf(x, inside[k], s_in) - norm.logpdf(x, outside[k], s_out)
        for k, x in enumerate(observed)
    ]
    np.testing.assert_allclose(membership_scores(observed, confidences, trained_on), expected)


def test_where_nothing_leaks_the_attack_is_a_guess():
    generator = np.random.default_rng(2)
    shadows = balanced_halves(8, 20_000, generator)
    members = generator.random(20_000) < 0.5
    observed, confidences = generator.normal(size=20_000), generator.normal(size=(8, 20_000))
    scores = membership_scores(observed, confidences, shadows)
    assert auc(members, scores) == pytest.approx(0.5, abs=0.015)
    assert true_positives_at(0.01, members, scores) == pytest.approx(0.01, abs=0.005)


def test_the_share_found_is_counted_while_so_many_are_accused():
    members = np.array([True, True, True, False, False, False, False])
    scores = np.array([9.0, 8.0, 3.0, 7.0, 2.0, 1.0, 0.0])
    assert true_positives_at(0.0, members, scores) == pytest.approx(2 / 3)
    assert true_positives_at(0.25, members, scores) == 1.0


def test_an_overfitted_model_leaks():
    """Networks that learned noise labels by heart: nothing but membership tells them apart."""
    generator = np.random.default_rng(3)
    members = generator.random((1, 200)) < 0.5
    trained_on = np.concatenate([members, balanced_halves(8, 200, generator)])
    inputs = torch.tensor(generator.normal(size=(200, 20)), dtype=torch.float32)
    labels = generator.integers(4, size=200)
    confidences = []
    for seed, own in enumerate(trained_on):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(100):
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs[own]), torch.tensor(labels[own])).backward()
            optimizer.step()
        confidences.append(logit_confidence(model(inputs).detach().double().numpy(), labels))
    observed, *shadows = confidences
    scores = membership_scores(observed, np.stack(shadows), trained_on[1:])
    assert auc(members[0], scores) > 0.8


def test_scores_with_a_set_left_out_are_those_of_all_other_sets():
    generator = np.random.default_rng(4)
    members = generator.random((9, 7)) < 0.5
    observed = generator.normal(size=(9, 7)) + members
    scores = left_out_scores(observed, members)
    for i, k in np.ndindex(9, 7):
        others = np.arange(9) != i
        inside, outside = (observed[others & (members[:, k] == m), k] for m in (True, False))
        expected = 0.0
        if min(len(inside), len(outside)) >= 2:
            densities = (
                norm.logpdf(observed[i, k], s.mean(), s.std(ddof=1)) for s in (inside, outside)
            )
            expected = next(densities) - next(densities)
        assert scores[i, k] == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_bounds_of_a_share_are_those_of_an_exact_binomial_test():
    for found, trials in [(0, 10), (3, 50), (50, 50)]:
        exact = binomtest(found, trials).proportion_ci(0.95, method="exact")
        assert share_bounds(found, trials) == pytest.approx((exact.low, exact.high))


def test_a_curve_s_values_are_those_of_the_plain_functions_equal_scores_too():
    generator = np.random.default_rng(0)
    members = generator.random((3, 400)) < 0.5
    for scores in (generator.random((3, 400)), generator.integers(0, 9, (3, 400)) * 1.0):
        plain = members.ravel(), scores.ravel()
        found = curve(members, scores, generator)
        assert found.auc.value == pytest.approx(auc(*plain))
        assert found.at_1pct.value == pytest.approx(true_positives_at(0.01, *plain))
        assert found.at_01pct.value == pytest.approx(true_positives_at(0.001, *plain))
        assert found.auc.low < found.auc.value < found.auc.high
        assert 0.02 < found.auc.high - found.auc.low < 0.12


def test_what_is_known_has_no_interval():
    generator = np.random.default_rng(0)
    members = generator.random((3, 400)) < 0.5
    assert curve(members, members * 1.0, generator) == ((1, 1, 1),) * 3


@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_the_proven_epsilon_is_below_that_of_a_known_mechanism_and_near_it(epsilon):
    """Randomised response has exactly this epsilon, and no delta."""
    generator = np.random.default_rng(5)
    truth = generator.random((2, 40_000)) < np.exp(epsilon) / (1 + np.exp(epsilon))
    inside, outside = truth[0] * 1.0, ~truth[1] * 1.0
    proven = least_epsilon(inside, outside, 0.0)
    assert 0.9 * epsilon < proven <= epsilon


def test_no_epsilon_is_proven_where_nothing_leaks():
    generator = np.random.default_rng(6)
    proven = [least_epsilon(*generator.normal(size=(2, 400)), 1e-5) for _ in range(40)]
    assert sum(p > 0 for p in proven) <= 4  # 95 % bounds
