"""Robust means against loops, and against models that a minority sends."""

import math
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_distill.protocol.outliers import room
from flwr_distill.strategies.common.averages import weighted_mean
from flwr_distill.strategies.common.robust import (
    agreement,
    apart,
    inner_products,
    limited,
    multi_krum,
    robust_mean,
    shortening,
    tells,
    too_long,
    usual_cosines,
)

RULES = ["agreement", "multi-krum", "trimmed-mean"]
START = {"w": np.full((4, 5), 0.5, np.float32), "n": np.array(3)}


def trained(count, seed=0, noise=0.5):
    """Models that moved in one direction, more or less."""
    generator = np.random.default_rng(seed)
    moves = 1 + noise * generator.normal(size=(count, 4, 5))
    return [{"w": START["w"] + move.astype(np.float32), "n": np.array(4)} for move in moves]


def sent(move, count=1):
    return [{"w": START["w"] + np.float32(move), "n": np.array(4)}] * count


def test_inner_products_are_those_of_the_changes():
    models = trained(6)
    changes = [(model["w"] - START["w"]).ravel() for model in models]
    expected = [[float(a @ b) for b in changes] for a in changes]
    np.testing.assert_allclose(inner_products(models, START), expected, rtol=1e-5)


def test_multi_krum_scores_as_in_the_paper():
    models = trained(10, noise=2.0)
    changes = [model["w"].astype(float).ravel() for model in models]
    scores = []
    for i, one in enumerate(changes):
        others = sorted(float(((one - o) ** 2).sum()) for j, o in enumerate(changes) if j != i)
        scores.append(sum(others[: 10 - 3 - 2]))
    expected = sorted(range(10), key=scores.__getitem__)[:7]
    found = np.flatnonzero(multi_krum(inner_products(models, START)))
    assert found.tolist() == sorted(expected)


def test_a_trimmed_mean_is_that_of_the_middle():
    models = trained(7)
    mean, weights = robust_mean("trimmed-mean", [1] * 7, models, START)
    expected = [sorted(float(m["w"].flat[i]) for m in models)[3] for i in range(20)]
    np.testing.assert_allclose(mean["w"].ravel(), expected, rtol=1e-6)
    assert mean["n"] == 4
    assert weights.tolist() == [1] * 7


@pytest.mark.parametrize("rule", ["mean", *RULES])
@pytest.mark.parametrize("count", [1, 4])
def test_fewer_than_five_models_are_averaged_by_weight(rule, count):
    models, weights = trained(count), [3.0, 1.0, 5.0, 2.0][:count]
    mean, kept = robust_mean(rule, weights, models, START)
    expected = weighted_mean(zip(weights, models, strict=True))
    np.testing.assert_array_equal(mean["w"], expected["w"])
    assert kept.tolist() == weights


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("claim", [1, 1e6])
@pytest.mark.parametrize("move", [-1.0, 1e4, -1e4, 0.0])
def test_three_of_ten_do_not_turn_the_mean(rule, claim, move):
    models = [*trained(7), *sent(move, 3)]
    mean, _ = robust_mean(rule, [10] * 7 + [10 * claim] * 3, models, START)
    change = (mean["w"] - START["w"]).ravel()
    assert 0.4 < change.mean() < 1.6


def test_agreement_keeps_all_that_go_along_and_moves_the_long_ones_back():
    models = [*trained(8), *sent(50.0)]
    products = inner_products(models, START)
    assert agreement(products).all()
    factors = shortening(products, 1.0)
    lengths = np.sqrt(products.diagonal()) * factors
    assert lengths.max() == pytest.approx(np.median(np.sqrt(products.diagonal())))
    _, weights = robust_mean("agreement", [10] * 9, models, START)
    assert weights[-1] < 0.5


def modified_z(values, least):
    middle = median(values)
    spread = 1.4826 * median(abs(value - middle) for value in values)
    return [(value - middle) / max(spread, least) for value in values]


def random_products(seed, count=9):
    """Inner products of changes of all lengths that share a direction more or less."""
    draws = np.random.default_rng(seed)
    shared = draws.choice([0.1, 1.0, 3.0], (count, 1)) + np.zeros(20)
    lengths = np.exp(0.3 * draws.standard_cauchy((count, 1)).clip(-9, 9))
    changes = lengths * (shared + draws.normal(size=(count, 20)))
    return changes, changes @ changes.T


@pytest.mark.parametrize("seed", range(10))
def test_too_long_is_an_outlier_among_lengths_that_samples_do_not_explain(seed):
    changes, products = random_products(seed)
    weights = np.random.default_rng(seed).integers(1, 50, len(changes)).astype(float)
    usual = median(weights)
    lengths = [math.log(math.hypot(*change)) for change in changes]
    rooms = [2 * math.log(max(weight / usual, 1)) for weight in weights]
    scores = modified_z([length - room for length, room in zip(lengths, rooms, strict=True)], 0.4)
    assert too_long(products, weights).tolist() == [score > 3.5 for score in scores]


@pytest.mark.parametrize("seed", range(10))
def test_apart_is_an_outlier_among_the_usual_cosines(seed):
    changes, products = random_products(seed)
    usual = [
        sorted(
            float(own @ other) / math.hypot(*own) / math.hypot(*other)
            for j, other in enumerate(changes)
            if j != i
        )[-4]  # of nine models
        for i, own in enumerate(changes)
    ]
    expected = [score > 3.5 for score in modified_z([-cosine for cosine in usual], 0.1)]
    assert apart(usual_cosines(products)).tolist() == expected


def test_models_that_lead_elsewhere_do_not_count_though_they_do_not_point_back():
    elsewhere = np.concatenate([np.full(12, 1.5), np.full(8, -1.5)]).reshape(4, 5)
    for honest in (3, 8):
        products = inner_products([*trained(honest), *sent(elsewhere, 2)], START)
        assert agreement(products).all()
        assert apart(usual_cosines(products)).tolist() == [False] * honest + [True] * 2


def test_a_model_that_points_back_is_told_from_others_that_are_alike():
    for count in (5, 8):
        similarity = usual_cosines(inner_products([*trained(count), *sent(-1.0, 2)], START))
        assert tells(similarity)
        assert apart(similarity).tolist() == [False] * count + [True] * 2


def test_a_large_node_beside_small_ones_is_not_too_long_and_a_replaced_model_is():
    lengths, weights = np.array([1.0, 1.2, 0.9, 1.1, 1.0, 0.8, 1.3, 1.0, 1.1, 41.0]), np.ones(10)
    products = np.outer(lengths, lengths)
    assert np.flatnonzero(too_long(products, weights)).tolist() == [9]
    weights[9] = 10  # 1,200 samples beside 12, capped
    assert not too_long(products, weights).any()


def test_honest_nodes_with_skewed_data_are_not_out_of_line():
    """Lengths and cosines of honest digits with Dirichlet 0.1 differ by as much as this."""
    draws = np.random.default_rng(0)
    changes = np.exp(0.7 * draws.normal(size=(10, 1))) * (0.3 + draws.normal(size=(10, 500)))
    products = changes @ changes.T
    assert not too_long(products, np.ones(10)).any()
    assert not apart(usual_cosines(products)).any()
    assert not tells(usual_cosines(products))


@pytest.mark.parametrize("products", [np.zeros((5, 5)), np.diag([0.0, 0.0, 0.0, 0.0, 1.0])])
def test_where_most_have_not_moved_nobody_is_out_of_line(products):
    assert not too_long(products, np.ones(5)).any()
    assert not apart(usual_cosines(products)).any()


def test_a_model_may_weigh_and_be_long_as_samples_usually_differ():
    samples = np.array([12.0, 18, 27, 40, 60, 90, 134, 201, 301, 450])
    logs = [math.log(n) for n in samples]
    deviations = [abs(log - median(logs)) for log in logs]
    most = math.exp(1.4826 * median(deviations))
    assert room(samples) == pytest.approx(most)
    assert most > 3
    assert limited(samples).tolist() == [min(n, most * 75) for n in samples]
    products = np.diag(samples**2)
    moved = np.sqrt(products.diagonal()) * shortening(products, most)
    np.testing.assert_allclose(moved, [min(length, most * 60) for length in samples])
    moved = np.sqrt(products.diagonal()) * shortening(products, most, longest=30)
    np.testing.assert_allclose(moved, [min(length, 30) for length in samples])


@pytest.mark.parametrize("hostile", [1, 2, 4])
def test_a_minority_that_claims_much_does_not_raise_what_a_model_may_weigh(hostile):
    samples = np.array([100.0] * (10 - hostile) + [1e15] * hostile)
    assert room(samples) == 1
    assert limited(samples).tolist() == [100] * 10


@pytest.mark.parametrize("seed", range(3))
def test_honest_nodes_of_many_sizes_are_averaged_much_as_by_their_samples(seed):
    """With at most the median's weight and length, a third of the step was left."""
    draws = np.random.default_rng(seed)
    samples = np.geomspace(12, 450, 10)
    moves = (samples**0.6)[:, None] * (1 + 0.5 * draws.normal(size=(10, 20)))
    models = [model for move in moves for model in sent(move.reshape(4, 5))]
    found, weights = robust_mean("agreement", samples.tolist(), models, START)
    assert (weights > 0).all()
    step, full = ((found["w"] - START["w"]).ravel(), samples @ moves / samples.sum())
    assert step @ full > 0.75 * (full @ full)


def test_without_a_common_direction_agreement_keeps_all():
    moves = np.concatenate([np.eye(20), -np.eye(20)]).reshape(-1, 4, 5)
    models = [model for move in moves for model in sent(move)]
    assert agreement(inner_products(models, START)).all()


@given(
    st.sampled_from(RULES),
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=5, max_size=9),
    st.integers(1, 2**63 - 1),
)
def test_a_mean_is_finite_and_between_the_extremes_or_the_start(rule, moves, claim):
    models = [model for move in moves for model in sent(move)]
    mean, weights = robust_mean(rule, [claim, *[1] * (len(moves) - 1)], models, START)
    values = [*(model["w"] for model in models), START["w"]]
    assert (np.min(values, axis=0) <= mean["w"] + 1e-3 * np.abs(mean["w"])).all()
    assert (np.max(values, axis=0) >= mean["w"] - 1e-3 * np.abs(mean["w"])).all()
    assert weights.sum() > 0


def test_of_few_models_agreement_keeps_all_and_none_counts_beyond_the_longest():
    models = [model for move in ([3.0], [4.0], [-40.0]) for model in sent(np.full((4, 5), move))]
    step = math.sqrt(20)  # of a change of 1 in 20 numbers
    mean, weights = robust_mean("agreement", [10] * 3, models, START, longest=4 * step)
    np.testing.assert_allclose(mean["w"] - START["w"], (3 + 4 - 4) / 3, rtol=1e-5)
    np.testing.assert_allclose(weights, [10, 10, 1])
    mean, _ = robust_mean("agreement", [10] * 3, models, START)
    np.testing.assert_allclose(mean["w"] - START["w"], (3 + 4 - 40) / 3, rtol=1e-5)
