"""Similarity, clusters and weights of CADIS against the paper's equations as loops."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_distill.strategies.cadis.similarity import (
    KnownPairs,
    aggregation_weights,
    clusters,
    instance_similarity,
    similarity_of_a_cluster,
    threshold,
    transitive_similarity,
)


def meetings(generator, num_clients, rounds):
    """Who takes part in each round, and s between them."""
    for _ in range(rounds):
        size = generator.integers(1, num_clients + 1)
        clients = np.sort(generator.choice(num_clients, size, replace=False))
        changes = generator.normal(size=(size, 4))
        yield clients, instance_similarity(changes)


def known_after(meetings):
    known = KnownPairs()
    for clients, similarity in meetings:
        known = known.after(clients, similarity)
    return known


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 1000))
def test_instance_similarity_is_the_cosine_of_two_changes(num_clients, size, seed):
    changes = np.random.default_rng(seed).normal(size=(num_clients, size)).astype(np.float32)
    found = instance_similarity(changes)
    for i in range(num_clients):
        for j in range(num_clients):
            dot = sum(float(a) * float(b) for a, b in zip(changes[i], changes[j], strict=True))
            lengths = [math.sqrt(sum(float(a) ** 2 for a in changes[x])) for x in (i, j)]
            assert found[i, j] == pytest.approx(dot / (lengths[0] * lengths[1]), abs=1e-9)


def test_a_client_that_changed_nothing_is_like_nobody():
    found = instance_similarity(np.array([[0.0, 0.0], [1.0, 2.0]]))
    assert found[0].tolist() == [0.0, 0.0]


@given(st.integers(1, 8), st.integers(0, 6), st.integers(0, 1000))
def test_cumulative_similarity_is_the_mean_over_the_rounds_of_both(num_clients, rounds, seed):
    met = list(meetings(np.random.default_rng(seed), num_clients, rounds))
    known = known_after(met)
    expected = {}
    for i in range(num_clients):
        for j in range(i + 1, num_clients):
            values = []
            for clients, similarity in met:
                place = clients.tolist()
                if i in place and j in place:
                    values.append(similarity[place.index(i), place.index(j)])
            if values:
                expected[i, j] = sum(values) / len(values)
    pairs = zip(*(x.tolist() for x in known.pairs), strict=True)
    found = dict(zip(pairs, known.similarity, strict=True))
    assert found == pytest.approx(expected)


def test_rows_hold_what_is_known_of_a_client_and_nan_elsewhere():
    known = known_after([(np.array([0, 2]), np.array([[1.0, 0.5], [0.5, 1.0]]))])
    nan = math.nan
    np.testing.assert_array_equal(
        known.rows(np.array([1, 2]), 4), [[nan, nan, nan, nan], [0.5, nan, nan, nan]]
    )


@given(st.integers(2, 9), st.integers(1, 4), st.integers(0, 1000))
def test_transitive_estimates_are_the_papers_over_every_client_that_met_both(n, rounds, seed):
    generator = np.random.default_rng(seed)
    known = KnownPairs()
    for clients, similarity in meetings(generator, n, rounds):
        alike = np.sign(similarity) * np.abs(similarity) ** 0.02  # so that some are very sure
        known = known.after(clients, alike)
    everyone = np.arange(n)
    S = known.rows(everyone, n)
    expected = {}
    for i in range(n):
        for j in range(i + 1, n):
            means, variances = [], []
            for k in range(n):
                if np.isnan(S[i, j]) and not np.isnan(S[i, k]) and not np.isnan(S[j, k]):
                    sigma = math.sqrt((1 - S[i, k] ** 2) * (1 - S[j, k] ** 2))
                    if sigma < 0.02:
                        means.append(S[i, k] * S[j, k])
                        variances.append(sigma**2)
            if means:
                deviation = math.sqrt(sum(variances)) / len(means)  # of a mean of normal draws
                expected[i, j] = (sum(means) / len(means), deviation)
    (first, second), means, deviations = transitive_similarity(S, everyone)
    found = {
        (int(i), int(j)): (mean, deviation)
        for i, j, mean, deviation in zip(first, second, means, deviations, strict=True)
    }
    assert found.keys() == expected.keys()
    for pair in expected:
        assert found[pair] == pytest.approx(expected[pair], abs=1e-9)


def test_clients_of_a_round_estimate_pairs_with_those_away_through_each_other():
    known = known_after(
        [
            (np.array(pair), np.array([[1, s], [s, 1]]))
            for pair, s in (([0, 1], 0.999), ([1, 2], 0.99))
        ]
    )
    clients = np.array([0, 1])
    (i, j), means, deviations = transitive_similarity(known.rows(clients, 3), clients)
    assert (i.tolist(), j.tolist()) == ([0], [2])
    assert means[0] == pytest.approx(0.999 * 0.99)
    assert deviations[0] == pytest.approx(math.sqrt((1 - 0.999**2) * (1 - 0.99**2)))


@given(st.integers(0, 1000))
def test_the_true_similarity_is_at_most_a_deviation_from_its_estimate(seed):
    """Theorem III.3, for a pair that one other client knows."""
    generator = np.random.default_rng(seed)
    S = instance_similarity(generator.normal(size=4) + 0.03 * generator.normal(size=(3, 4)))
    truth, rows = S[0, 2], S.copy()
    rows[0, 2] = rows[2, 0] = math.nan
    np.fill_diagonal(rows, math.nan)
    _, means, deviations = transitive_similarity(rows, np.arange(3))
    for mean, deviation in zip(means, deviations, strict=True):
        assert mean - deviation - 1e-9 <= truth <= mean + deviation + 1e-9


@pytest.mark.parametrize("unknown", [False, True])
def test_pairs_that_are_known_take_no_time_to_estimate(monkeypatch, unknown):
    """A thousand like clients that all trained took two minutes a round."""
    outer, products = np.outer, []
    monkeypatch.setattr(np, "outer", lambda a, b: products.append(len(a) * len(b)) or outer(a, b))
    everyone = np.arange(5)
    rows = KnownPairs().after(everyone, np.full((5, 5), 0.999)).rows(everyone, 5)
    if unknown:
        rows[0, 1] = rows[1, 0] = np.nan
    (i, j), _, _ = transitive_similarity(rows, everyone)
    assert list(zip(i, j, strict=True)) == [(0, 1)] * unknown
    assert max(products) == 4 * unknown


def test_the_threshold_rises_as_published():
    eps = 0.975
    for t in range(60):
        assert threshold(t + 1) == pytest.approx(eps, abs=1e-12)
        eps = min(eps * 1.0005**t, 0.985)
    assert threshold(10**6) == pytest.approx(0.985)


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=20), st.floats(0, 1))
def test_pairs_above_the_needed_similarity_are_those_with_q_above_eps(values, eps):
    S = np.array(values)
    low, high = min(values), max(values)
    needed = similarity_of_a_cluster(S, eps)
    if high - low < 1e-6:
        assert needed < min(values)
        return
    for s in values:
        q = (s - low) / (high - low)
        if abs(q - eps) > 1e-9:
            assert (s > needed) == (q > eps)


def test_equal_similarities_up_to_rounding_make_one_cluster_and_none_at_all_make_none():
    rounded = np.array([0.3, 0.3 + 1e-9, 0.3])
    assert (rounded > similarity_of_a_cluster(rounded, 0.975)).all()
    assert clusters(3, KnownPairs().links(-math.inf)).tolist() == [0, 1, 2]


def test_pairs_are_judged_by_the_highest_that_their_mean_has_been():
    clients, s = np.arange(3), np.zeros((3, 3))
    known, means = KnownPairs(), []
    for values in ([0.2, 0.9, -0.5], [0.8, 0.1, -0.7], [0.0, 0.2, -0.1]):
        s[np.triu_indices(3, 1)] = values
        known = known.after(clients, s)
        means.append(known.similarity)
    np.testing.assert_array_equal(known.peaks, np.max(means, axis=0))
    assert [x.tolist() for x in known.links(0.6)] == [[0], [2]]


@given(st.integers(1, 8), st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=12))
def test_clusters_are_closed_transitively(num_clients, links):
    links = [(i % num_clients, j % num_clients) for i, j in links]
    reached = np.eye(num_clients, dtype=bool)
    for i, j in links:
        reached[i, j] = reached[j, i] = True
    for k in range(num_clients):
        for i in range(num_clients):
            for j in range(num_clients):
                reached[i, j] |= reached[i, k] and reached[k, j]
    first, second = np.array(links, dtype=np.int64).reshape(-1, 2).T
    cluster_of = clusters(num_clients, (first[:3], second[:3]), (first[3:], second[3:]))
    np.testing.assert_array_equal(cluster_of[:, None] == cluster_of[None], reached)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 500)), min_size=1, max_size=12))
def test_weights_are_the_papers_and_clusters_of_equal_clients_weigh_the_same(clients):
    cluster_of = np.array([c for c, _ in clients])
    num_examples = np.array([n for _, n in clients])
    n = sum(num_examples)
    u = [
        1 / sum(1 for other in cluster_of if other == c) * n_i / n
        for c, n_i in zip(cluster_of, num_examples, strict=True)
    ]
    found = aggregation_weights(cluster_of, num_examples)
    np.testing.assert_allclose(found, [u_i / sum(u) for u_i in u])
    even = aggregation_weights(cluster_of, np.ones(len(clients)))
    shares = [even[cluster_of == c].sum() for c in set(cluster_of.tolist())]
    np.testing.assert_allclose(shares, 1 / len(shares))


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 500)), min_size=1, max_size=12),
    st.floats(1, 5),
)
def test_no_cluster_weighs_more_than_its_cap_and_within_clusters_samples_count(clients, most):
    cluster_of = np.array([c for c, _ in clients])
    num_examples = np.array([n for _, n in clients])
    capped = aggregation_weights(cluster_of, num_examples, most)
    papers = aggregation_weights(cluster_of, num_examples)
    assert capped.sum() == pytest.approx(1)
    caps = {c: most * (cluster_of == c).mean() for c in set(cluster_of.tolist())}
    for c, cap in caps.items():
        inside = cluster_of == c
        assert capped[inside].sum() <= cap * (1 + 1e-6)
        np.testing.assert_allclose(
            capped[inside] * papers[inside].sum(), papers[inside] * capped[inside].sum()
        )
    if all(papers[cluster_of == c].sum() <= cap for c, cap in caps.items()):
        np.testing.assert_allclose(capped, papers)
