"""FedSeq's superclients: the published greedy rule, its limits, and who joins later."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_distill_baselines.fedseq_zaccone.grouping import (
    evenness,
    greedy_superclients,
    superclient_to_join,
)


def naive_evenness(p, q):
    """1 - KL((p + q) / 2 || uniform), term by term."""
    total = 0.0
    for a, b in zip(p, q, strict=True):
        mean = max((a + b) / 2, 1e-10)
        total += mean * math.log(mean / (1 / len(p)))
    return 1 - total


def naive_superclients(confidences, num_examples, least, most):
    """The published code's loop, without its redistribution of the last superclient."""
    left, groups, current = list(range(len(confidences))), [], []
    while left:
        if sum(num_examples[c] for c in current) < least and len(current) < most:
            total = sum(num_examples[c] for c in current)
            classes = len(confidences[0])
            if current:
                own = [
                    sum(confidences[c][k] * num_examples[c] / total for c in current)
                    for k in range(classes)
                ]
            else:
                own = [1 / classes] * classes
            best = max(left, key=lambda c: (naive_evenness(own, confidences[c]), -c))
            left.remove(best)
            current.append(best)
        else:
            groups.append(current)
            current = []
    return groups, current


def drawn(seed, clients=9, classes=4):
    rng = np.random.default_rng(seed)
    return rng.dirichlet([0.3] * classes, size=clients), rng.integers(20, 200, size=clients)


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 600))
@settings(max_examples=60)
def test_superclients_are_those_of_the_published_loop(seed, most, least):
    confidences, sizes = drawn(seed)
    complete, rest = naive_superclients(confidences.tolist(), sizes.tolist(), least, most)
    found = greedy_superclients(confidences, sizes, least, most)
    for group, expected in zip(found, complete, strict=False):
        assert group[: len(expected)] == expected
        assert set(group[len(expected) :]) <= set(rest)
    assert sorted(client for group in found for client in group) == list(range(9))
    assert max(map(len, found)) <= most


def test_the_measure_is_one_for_a_whole_that_is_even():
    assert evenness(np.array([1.0, 0.0]), np.array([[0.0, 1.0], [1.0, 0.0]])) == pytest.approx(
        [1.0, 1 - math.log(2)]
    )


def test_clients_of_one_class_each_come_together_to_all_classes():
    confidences = np.eye(4)[[0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]]
    groups = greedy_superclients(confidences, np.full(12, 100), 400, 11)
    assert [sorted(client // 3 for client in group) for group in groups] == [[0, 1, 2, 3]] * 3


def test_a_last_superclient_with_too_few_samples_is_spread_over_the_others():
    confidences = np.full((5, 2), 0.5)
    groups = greedy_superclients(confidences, np.full(5, 100), 200, 3)
    assert sorted(map(len, groups)) == [2, 3]
    full = greedy_superclients(confidences, np.full(5, 100), 200, 2)
    assert sorted(map(len, full)) == [1, 2, 2]  # no room: it stays


def test_one_small_federation_is_one_superclient():
    assert len(greedy_superclients(np.full((3, 2), 0.5), np.full(3, 10), 800, 11)) == 1


def test_a_new_client_joins_where_it_evens_out_most_and_there_is_room():
    confidences = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    sizes, newcomer = np.full(4, 10), np.array([1.0, 0.0])
    groups = [[0, 1], [2, 3]]
    assert superclient_to_join(groups, confidences, sizes, newcomer, 3) == 1
    assert superclient_to_join([[0, 1], [2]], confidences, sizes, newcomer, 2) == 1
    assert superclient_to_join(groups, confidences, sizes, newcomer, 2) is None
