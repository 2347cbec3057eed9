"""Grouping and clustering of clients (HFLDD, steps 2 and 3)."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_distill.strategies.hfldd.clustering import (
    cluster_to_join,
    heterogeneous_clusters,
    homogeneous_groups,
    kl_matrix,
    nearest_group,
    silhouette_above_noise,
)


def soft_labels_of(generator, clients, samples, classes):
    logits = generator.normal(size=(clients, samples, classes))
    return np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)


def naive_kl(soft_labels):
    clients, samples, classes = soft_labels.shape
    matrix = np.zeros((clients, clients))
    for i in range(clients):
        for j in range(clients):
            total = 0.0
            for k in range(samples):
                for c in range(classes):
                    p, q = soft_labels[i, k, c], soft_labels[j, k, c]
                    total += p * math.log(p / q)
            matrix[i, j] = total / samples
    return matrix


def knowledge_of_single_class_clients(generator, num_clients, num_classes, noise=0.1):
    """Soft labels of clients that each saw one class: that class is likely everywhere."""
    logits = noise * generator.normal(size=(num_clients, 50, num_classes))
    for client in range(num_clients):
        logits[client, :, client % num_classes] += 2.0
    return np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(2, 4), st.integers(0, 1000))
def test_kl_matrix_equals_the_papers_sum(clients, samples, classes, seed):
    soft_labels = soft_labels_of(np.random.default_rng(seed), clients, samples, classes)
    np.testing.assert_allclose(kl_matrix(soft_labels), naive_kl(soft_labels), atol=1e-12)


def test_kl_matrix_stays_finite_where_a_client_rules_a_class_out():
    soft_labels = np.array([[[1.0, 0.0]], [[0.0, 1.0]]])
    assert np.isfinite(kl_matrix(soft_labels)).all()
    assert kl_matrix(soft_labels)[0, 1] > 20


def test_hundred_single_class_clients_form_ten_clusters_of_ten_different_classes():
    generator = np.random.default_rng(1)
    soft_labels = knowledge_of_single_class_clients(generator, 100, 10)
    groups = homogeneous_groups(kl_matrix(soft_labels), 10, seed=0)
    clusters = heterogeneous_clusters(groups, generator)
    assert len(clusters) == 10
    for cluster in clusters:
        assert sorted(client % 10 for client in cluster) == list(range(10))


def test_groups_are_lowered_to_the_number_of_distinct_clients():
    soft_labels = np.tile(soft_labels_of(np.random.default_rng(0), 1, 5, 3), (4, 1, 1))
    assert set(homogeneous_groups(kl_matrix(soft_labels), 3, seed=0)) == {0}
    assert set(homogeneous_groups(kl_matrix(soft_labels), None, seed=0)) == {0}


def knowledge(proportions, apart=0.3, noise=0.02, seed=0):
    """Soft labels of clients that lean to their classes, and the divergence of their halves."""
    generator = np.random.default_rng(seed)
    proportions = np.array(proportions, dtype=float)
    proportions /= proportions.sum(axis=1, keepdims=True)

    def drawn():
        logits = apart * proportions[:, None, :] + noise * generator.normal(
            size=(len(proportions), 50, proportions.shape[1])
        )
        return np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)

    first, second = drawn(), drawn()
    halves = [naive_kl(np.stack(pair)) for pair in zip(first, second, strict=True)]
    return kl_matrix(drawn()), np.array([(m[0, 1] + m[1, 0]) / 2 for m in halves])


def groups_of(proportions, **more):
    divergence, noise = knowledge(proportions, **more)
    classes = len(proportions[0])
    return homogeneous_groups(divergence, None, seed=0, most=classes, noise=noise).tolist()


def test_five_clients_with_two_classes_each_that_nobody_shares_form_five_groups():
    pairs = np.eye(10).reshape(5, 2, 10).sum(axis=1)
    assert len(set(groups_of(pairs))) == 5
    twice = groups_of(np.concatenate([pairs, pairs]))
    assert len(set(twice)) == 5
    assert twice[:5] == twice[5:]


def test_four_clients_whose_classes_overlap_a_little_form_four_groups():
    blocks = [np.isin(np.arange(10), [(3 * i + k) % 10 for k in range(3)]) for i in range(4)]
    assert len(set(groups_of(blocks))) == 4


@pytest.mark.parametrize("clients", [2, 3, 5, 10, 40])
@pytest.mark.parametrize("seed", [0, 1])
def test_clients_that_differ_no_more_than_their_own_halves_form_one_group(clients, seed):
    assert set(groups_of(np.ones((clients, 10)), seed=seed)) == {0}


def test_there_are_at_most_as_many_groups_as_classes_and_with_many_classes_more_than_twenty():
    different = np.random.default_rng(0).dirichlet(np.ones(3), size=12)
    assert len(set(groups_of(different))) <= 3
    assert len(set(groups_of(np.tile(np.eye(30), (2, 1)), apart=2.0))) == 30


def test_without_their_noise_clients_form_fewer_groups_than_there_are():
    divergence, _ = knowledge(np.eye(10).reshape(5, 2, 10).sum(axis=1))
    assert 1 <= len(set(homogeneous_groups(divergence, None, seed=0).tolist())) < 5


def test_the_silhouette_above_noise_equals_its_definition():
    divergence, noise = knowledge(np.random.default_rng(2).dirichlet(np.ones(4), size=7))
    groups = np.array([0, 1, 0, 2, 2, 0, 3])
    scores = []
    for i in range(7):
        distances = [math.sqrt((divergence[i, j] + divergence[j, i]) / 2) for j in range(7)]
        means = {g: [distances[j] for j in range(7) if groups[j] == g and j != i] for g in range(4)}
        own = means.pop(groups[i])
        a = max(sum(own) / len(own) if own else 0.0, math.sqrt(noise[i]))
        b = min(sum(other) / len(other) for other in means.values())
        scores.append((b - a) / max(a, b))
    assert silhouette_above_noise(divergence, groups, noise) == pytest.approx(np.mean(scores))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(0, 1000))
def test_clusters_take_at_most_one_client_of_each_group_and_every_client_once(groups, seed):
    groups = np.array(groups)
    clusters = heterogeneous_clusters(groups, np.random.default_rng(seed))
    assert sorted(client for cluster in clusters for client in cluster) == list(range(len(groups)))
    for cluster in clusters:
        held = groups[cluster].tolist()
        assert len(held) == len(set(held))
    sizes = [len(cluster) for cluster in clusters]
    assert sizes == sorted(sizes, reverse=True)
    assert len(clusters) == np.bincount(groups).max()


def chance_of_a_group(groups, clusters):
    """Chance that a random client's group has a client in a random cluster."""
    return np.mean(
        [[groups[i] in groups[cluster] for cluster in clusters] for i in range(len(groups))]
    )


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(0, 1000))
def test_nearly_every_group_is_in_each_complete_cluster_and_sizes_are_equal(groups, seed):
    groups = np.array(groups)
    clusters = heterogeneous_clusters(groups, np.random.default_rng(seed), complete=True)
    assert sorted(client for cluster in clusters for client in cluster) == list(range(len(groups)))
    sizes = [len(cluster) for cluster in clusters]
    assert max(sizes) - min(sizes) <= 1
    assert chance_of_a_group(groups, clusters) >= 0.97
    if len(clusters) < np.bincount(groups).max():  # one more would miss too much
        dealt = np.argsort(groups)
        more = [dealt[first :: len(clusters) + 1] for first in range(len(clusters) + 1)]
        assert chance_of_a_group(groups, more) < 0.97


@pytest.mark.parametrize(
    ("sizes", "clusters"),
    [((99, 1), 99), ((9, 1), 1), ((6, 3, 1), 1), ((2,) * 9 + (1,), 2), ((90, 10), 14)],
)
def test_few_odd_clients_do_not_make_one_cluster_of_all(sizes, clusters):
    groups = np.repeat(np.arange(len(sizes)), sizes)
    assert len(heterogeneous_clusters(groups, np.random.default_rng(0), complete=True)) == clusters


def test_complete_clusters_of_equal_groups_are_those_of_the_paper():
    groups = np.repeat(np.arange(5), 6)
    drawn = [
        heterogeneous_clusters(groups, np.random.default_rng(3), complete=complete)
        for complete in (False, True)
    ]
    assert drawn[0] == drawn[1]


def test_clusters_are_the_same_for_the_same_seed_and_differ_for_another():
    groups = np.repeat(np.arange(5), 6)
    drawn = [heterogeneous_clusters(groups, np.random.default_rng(s)) for s in (3, 3, 4)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


@given(st.integers(1, 5), st.integers(1, 3), st.integers(2, 4), st.integers(0, 1000))
def test_the_nearest_group_is_that_of_the_papers_sum(groups, samples, classes, seed):
    client, *means = soft_labels_of(np.random.default_rng(seed), 1 + groups, samples, classes)
    divergence = naive_kl(np.stack([client, *means]))[0, 1:].tolist()
    assert nearest_group(client, np.stack(means)) == divergence.index(min(divergence))


@pytest.mark.parametrize(
    ("clusters", "group", "joined"),
    [
        ([[0, 1, 2], [3, 4], [5, 6, 7, 8]], {0, 3, 5}, 1),
        ([[5, 6, 7, 8], [0, 1, 2], [3]], set(), 2),
        ([[0, 1], [2, 3, 4, 5]], {0}, 1),
        ([[0, 1, 2, 3], [4], [5, 6, 7]], {4, 0}, 2),
        ([[0, 1], [2, 3]], {0, 2}, 0),
    ],
)
def test_a_client_joins_the_cluster_with_fewest_of_its_group_and_of_several_the_smallest(
    clusters, group, joined
):
    assert cluster_to_join(clusters, group) == joined


def test_a_large_group_is_not_searched_for_each_client_of_each_cluster():
    class Group(list):
        def __contains__(self, client):
            pytest.fail("each search takes as long as the group is large")

    assert cluster_to_join([[0, 1, 2], [3, 4]], Group([0, 3])) == 1
