"""What stands out: the norm of an update, and values that are absurdly large among others."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_distill.protocol.outliers import absurdly_large, idle, update_norm


@given(st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=6), st.floats(-9, 9, width=32))
def test_the_norm_is_that_of_all_changes_of_floating_point_numbers(values, step):
    start = {
        "a": np.array(values, np.float32),
        "b": np.array([values], np.float64),
        "n": np.array(4),
    }
    moved = {
        "a": start["a"] + np.float32(step),
        "b": start["b"] * 2,
        "n": np.array(10**9),
    }
    squares = [(float(new) - old) ** 2 for new, old in zip(moved["a"], values, strict=True)]
    squares += [value**2 for value in values]
    assert update_norm(moved, start) == pytest.approx(math.sqrt(sum(squares)))


def scores(values):
    """Robust z-scores of logarithms, with at least 1 as their unit."""
    logs = [math.log(value) for value in values]
    median = statistics.median(logs)
    unit = max(1.4826 * statistics.median(abs(log - median) for log in logs), 1.0)
    return [(log - median) / unit for log in logs]


@given(st.lists(st.floats(1e-6, 1e9), min_size=4, max_size=12), st.floats(0.1, 8))
def test_absurd_is_what_scores_above_the_threshold(values, threshold):
    expected = [i for i, score in enumerate(scores(values)) if score > threshold]
    assert absurdly_large(dict(enumerate(values)), threshold) == expected


@given(st.lists(st.floats(1.0, 140.0), min_size=4, max_size=12))
def test_what_differs_by_less_than_140_times_is_never_absurd_by_default(values):
    assert absurdly_large(dict(enumerate(values)), 5.0) == []


@given(st.lists(st.floats(0.67, 1.5), min_size=8, max_size=40), st.floats(1e-6, 1e6))
def test_two_in_ten_that_are_1000_times_too_large_are_always_found(honest, unit):
    num_hostile = len(honest) // 4
    values = [unit * value for value in (*honest, *[1000.0] * num_hostile)]
    found = absurdly_large(dict(enumerate(values)), 5.0)
    assert found == list(range(len(honest), len(values)))


@pytest.mark.parametrize("values", [[1, 1, 1e9], [1, 0, 0, 0, 1, 1e9], [0] * 9, []])
def test_among_fewer_than_four_nothing_is_absurd_and_zeros_do_not_count(values):
    assert absurdly_large(dict(enumerate(values)), 5.0) == []


def test_with_a_threshold_of_0_nothing_is_absurd():
    values = dict(enumerate([1, 1, 1, 1, 1e9]))
    assert absurdly_large(values, 5.0) == [4]
    assert absurdly_large(values, 0) == []


@pytest.mark.parametrize("sent", [0.0, 1e-4])
def test_a_free_rider_has_learnt_next_to_nothing_and_a_small_honest_node_has(sent):
    small, large = 0.024, [1.0, 0.7, 1.3, 1.1, 0.9, 0.8, 1.2]  # 12 samples beside 1,200
    assert idle(dict(enumerate([small, sent, *large, sent]))) == [1, 9]


@pytest.mark.parametrize("norms", [[], [0.0], [0.0] * 9, [1.0, 0.0], [1.0, 1.0, 1e9, 1e9]])
def test_half_of_the_nodes_cannot_make_the_others_look_like_free_riders(norms):
    assert idle(dict(enumerate(norms))) == []


def test_the_usual_norm_is_found_once_for_all_nodes():
    """At ten thousand nodes a median for each would take a quarter of a minute."""

    class Counted(dict[int, float]):
        medians = 0

        def values(self):
            Counted.medians += 1
            return super().values()

    assert idle(Counted(enumerate([1.0] * 9 + [1e-9]))) == [9]
    assert Counted.medians == 1


def test_without_a_start_the_norm_is_that_of_the_arrays_themselves():
    arrays = {"a": np.array([3.0, 0.0], np.float32), "b": np.array([[4.0]]), "n": np.array(9)}
    assert update_norm(arrays, None) == 5.0
    assert update_norm({}, None) == 0.0


def test_the_norm_of_huge_half_precision_changes_does_not_overflow():
    start = {"a": np.full(4, -6e4, np.float16)}
    moved = {"a": np.full(4, 6e4, np.float16)}
    assert update_norm(moved, start) == pytest.approx(2 * 1.2e5, rel=1e-3)
