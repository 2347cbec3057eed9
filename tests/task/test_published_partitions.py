"""Splits as published with CADIS's code: who has which classes, and how many samples."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_distill.task.partition import PartitionError, check_partition, partition_indices
from tests.errors import at

NODES = 100
MNIST = np.repeat(
    np.arange(10), [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
).astype(np.int64)
CIFAR10, CIFAR100 = np.repeat(np.arange(10), 5000), np.repeat(np.arange(100), 500)
MC_OF_CIFAR100 = [15, 7, 5, 5, 4, 3, 3, *[2] * 15]
PUBLISHED = {
    "MNIST MC": (MNIST, [30, 30, 20, 10, 10], {"samples": "290", "spread": 0.3}, 86, 498),
    "MNIST BC 60": (MNIST, [60], {"samples": "192"}, 192, 192),
    "MNIST UC 60": (MNIST, [60], {"samples": "190", "spread": 0.09}, 148, 226),
    "MNIST BC 40": (MNIST, [40], {"samples": "290"}, 290, 290),
    "MNIST UC 40": (MNIST, [40], {"samples": "289", "spread": 0.1}, 204, 368),
    "CIFAR-10 MC": (CIFAR10, [33, 30, 22, 12, 3], {}, 302, 302),
    "CIFAR-10 BC": (CIFAR10, [96], {}, 104, 104),
    "CIFAR-10 UC": (CIFAR10, [96], {"samples": "52:5000", "spread": 0.075}, 44, 5872),
    "CIFAR-100 MC": (CIFAR100, MC_OF_CIFAR100, {}, 66, 66),
    "CIFAR-100 BC": (CIFAR100, [51], {}, 18, 18),
}
"""Labels, nodes of each cluster of 100, settings, and the published bounds of a node's samples."""


def counts_of(labels, parts):
    """Samples of each class (column) on each node (row), of parts that are disjoint."""
    everything = np.concatenate(parts)
    assert len(np.unique(everything)) == len(everything)
    return np.array([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])


@pytest.mark.parametrize("name", PUBLISHED)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31 - 1))
def test_clusters_and_sizes_are_those_published(name, seed):
    labels, clusters, options, fewest, most = PUBLISHED[name]
    sizes = ":".join(map(str, clusters))
    split = {"scheme": "class-pairs", "clusters": sizes, **options}
    counts = counts_of(labels, partition_indices(labels, NODES, seed=seed, **split))
    held = [tuple(np.flatnonzero(row).tolist()) for row in counts]
    assert held[: sum(clusters)] == [
        (2 * k, 2 * k + 1) for k, size in enumerate(clusters) for _ in range(size)
    ]
    used = Counter(c for pair in held[sum(clusters) :] for c in pair)
    if used:
        assert used.keys() == set(range(2 * len(clusters), labels.max() + 1))
        assert max(used.values()) - min(used.values()) <= 1
    assert all(row[row > 0].tolist() == [row.max()] * 2 for row in counts)
    assert fewest <= counts.sum(axis=1).min()
    assert counts.sum(axis=1).max() <= most


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31 - 1))
def test_without_a_mean_nodes_have_as_many_samples_as_all_classes_allow(seed):
    split = {"scheme": "class-pairs", "clusters": "33:30:22:12:3", "spread": 0.3}
    counts = counts_of(CIFAR10, partition_indices(CIFAR10, NODES, seed=seed, **split))
    spent = counts.sum(axis=0)
    assert 5000 - 33 <= spent.max() <= 5000
    sizes = counts.max(axis=1)
    assert np.std(sizes) > 0.15 * np.mean(sizes)


@pytest.mark.parametrize("nodes", [5, 12, 30])
def test_clusters_keep_their_shares_among_fewer_nodes(nodes):
    split = {"scheme": "class-pairs", "clusters": "30:30:20:10"}
    counts = counts_of(MNIST, partition_indices(MNIST, nodes, **split))
    for k, share in enumerate([30, 30, 20, 10]):
        assert abs((counts[:, 2 * k] > 0).sum() - share * nodes / 100) <= 1


def test_means_that_are_too_large_shrink_alike():
    split = {"scheme": "class-pairs", "clusters": "96", "samples": "52:5000"}
    few = np.repeat(np.arange(10), 600)
    sizes = [
        counts_of(labels, partition_indices(labels, NODES, **split)).sum(axis=1)
        for labels in (CIFAR10, few)
    ]
    assert [(sizes[0][0], sizes[0][-1]), (sizes[1][0], sizes[1][-1])] == [(52, 5000), (12, 1200)]


@pytest.mark.parametrize(("labels", "draws"), [(MNIST, 2), (CIFAR10, 3), (CIFAR100, 3)])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31 - 1))
def test_draws_by_a_power_law_give_a_node_one_to_c_classes(labels, draws, seed):
    split = {"scheme": "pareto-draws", "classes_per_node": draws, "alpha": 1.5}
    counts = counts_of(labels, partition_indices(labels, NODES, seed=seed, **split))
    num_classes = (counts > 0).sum(axis=1)
    assert num_classes.min() >= 1
    assert num_classes.max() == draws
    sizes = counts.sum(axis=1)
    assert sizes.min() >= draws
    assert (sizes % draws == 0).all()
    assert sizes.max() > 5 * np.median(sizes)
    for row, size in zip(counts, sizes, strict=True):  # a class drawn twice counts twice
        assert (row % (size // draws) == 0).all()


def test_a_class_that_is_drawn_twice_is_as_rare_as_among_free_draws():
    split = {"scheme": "pareto-draws", "classes_per_node": 2, "alpha": 1.5}
    nodes = [
        node
        for seed in range(10)
        for node in counts_of(MNIST, partition_indices(MNIST, NODES, seed=seed, **split))
    ]
    single = np.mean([(node > 0).sum() == 1 for node in nodes])
    assert single == pytest.approx(0.1, abs=0.03)


def test_sizes_of_nodes_follow_the_power_law():
    labels = np.repeat(np.arange(2), 10**6)
    split = {"scheme": "pareto-draws", "classes_per_node": 1, "alpha": 2.0}
    parts = partition_indices(labels, 2000, **split)
    sizes = np.sort([len(part) for part in parts])[::-1] - 1
    scale = np.median(sizes) / (2**0.5 - 1)  # half of all u are above it
    rank = np.arange(1, 1001)
    slope, _ = np.polyfit(np.log(1 + sizes[:1000] / scale), np.log(rank), 1)
    assert slope == pytest.approx(-2.0, abs=0.2)


@pytest.mark.parametrize(
    "split", [{"scheme": "class-pairs", "clusters": "96"}, {"scheme": "iid"}, {"scheme": "pareto"}]
)
def test_a_single_node_may_have_what_many_would_have(split):
    parts = partition_indices(CIFAR10, NODES, seed=1, **split)
    (pooled,) = partition_indices(CIFAR10, 1, pooled=NODES, seed=1, **split)
    assert pooled.tolist() == sorted(np.concatenate(parts).tolist())


@pytest.mark.parametrize(
    ("options", "where", "value"),
    [
        ({"clusters": "60:41"}, "partition.clusters", "60:41"),
        ({"clusters": "20:20:20:20:19"}, "partition.clusters", "20:20:20:20:19"),
        ({"clusters": "1:1:1:1:1:95"}, "partition.clusters", "1:1:1:1:1:95"),
        ({"scheme": "pareto-draws", "classes_per_node": 11}, "partition.classes", 11),
        ({"scheme": "pareto-draws", "alpha": 0}, "partition.alpha", 0),
        ({"pooled": 3}, "partition.pooled", 3),
    ],
)
def test_impossible_settings_are_errors_with_key_and_value(options, where, value):
    with pytest.raises(PartitionError, check=at(where, value=value)):
        partition_indices(MNIST, NODES, **{"scheme": "class-pairs", **options})


@pytest.mark.parametrize(
    ("scheme", "clusters", "classes", "where"),
    [
        ("class-pairs", "1:1:1:1:1:95", 0, "partition.clusters"),
        ("class-pairs", "60:41", 0, "partition.clusters"),
        ("pareto-draws", "", 11, "partition.classes"),
    ],
)
def test_what_no_number_of_nodes_makes_possible_is_an_error_before_the_run(
    scheme, clusters, classes, where
):
    with pytest.raises(PartitionError, check=at(where)):
        check_partition(MNIST, scheme=scheme, classes_per_node=classes, clusters=clusters)


def test_more_nodes_than_a_class_has_samples_are_an_error():
    few = np.repeat(np.arange(10), 50)
    with pytest.raises(PartitionError, check=at("partition.scheme")):
        partition_indices(few, NODES, scheme="class-pairs", clusters="51")
