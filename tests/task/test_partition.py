"""Partitions of samples among nodes, and their picture."""

import json
import math
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_distill.task.datasets import load_dataset
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.partition import (
    SCHEMES,
    PartitionError,
    draw_samples,
    partition_indices,
)
from flwr_distill.task.partition.picture import partition_picture
from flwr_distill.task.settings import PartitionSettings
from tests.errors import at

LIBRARY_SCHEMES = ["iid", "dirichlet", "shards"]
CLUSTER_SCHEMES = ["cluster-mc", "cluster-bc", "cluster-uc"]
PUBLISHED_SCHEMES = ["class-pairs", "pareto-draws"]
SEEDED_SCHEMES = [
    "pathological",
    "label-quantity",
    "pareto",
    *LIBRARY_SCHEMES,
    *CLUSTER_SCHEMES,
    *PUBLISHED_SCHEMES,
]


def _labels(per_class, num_classes, seed=0):
    return (
        np.random.default_rng(seed)
        .permutation(np.repeat(np.arange(num_classes), per_class))
        .astype(np.int64)
    )


def _assert_disjoint_sorted_int64(parts, num_samples):
    everything = np.concatenate(parts)
    assert len(np.unique(everything)) == len(everything)
    assert everything.min() >= 0
    assert everything.max() < num_samples
    for part in parts:
        assert part.dtype == np.int64
        assert len(part) > 0
        assert (np.diff(part) > 0).all()


def _counts(labels, parts):
    """Samples of each class (column) on each node (row)."""
    return np.array([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])


@st.composite
def _pathological_cases(draw):
    num_classes = draw(st.integers(1, 8))
    return (
        _labels(draw(st.integers(20, 30)), num_classes, draw(st.integers(0, 99))),
        draw(st.integers(1, 20)),
        draw(st.integers(1, num_classes)),
        draw(st.integers(0, 99)),
    )


@settings(max_examples=80, deadline=None)
@given(_pathological_cases())
def test_pathological_shares_each_class_equally_among_the_nodes_of_its_blocks(case):
    labels, nodes, per_node, seed = case
    num_classes = labels.max() + 1
    parts = partition_indices(labels, nodes, classes_per_node=per_node, seed=seed)
    _assert_disjoint_sorted_int64(parts, len(labels))
    for node, part in enumerate(parts):
        block = {(node * per_node + k) % num_classes for k in range(per_node)}
        assert set(labels[part]) == block
    assert sum(map(len, parts)) == (labels < min(nodes * per_node, num_classes)).sum()
    for column in _counts(labels, parts).T:
        assert not column.any() or np.ptp(column[column > 0]) <= 1


@pytest.mark.parametrize("scheme", ["pathological", "pareto", "shards"])
@pytest.mark.parametrize(
    ("nodes", "per_node"), [(1, 10), (2, 5), (3, 4), (4, 3), (5, 2), (7, 2), (10, 2), (20, 2)]
)
def test_by_default_nodes_hold_all_classes_together_with_few_on_each(scheme, nodes, per_node):
    labels = _labels(30, 10)
    parts = partition_indices(labels, nodes, scheme=scheme)
    assert set(labels[np.concatenate(parts)]) == set(range(10))
    if scheme != "shards":
        assert {len(set(labels[part])) for part in parts} == {per_node}


@pytest.mark.parametrize("per_node", [1, 2, 10])
def test_label_quantity_gives_each_node_its_own_class_and_random_others(per_node):
    labels, nodes = _labels(400, 10), 100
    parts = partition_indices(
        labels, nodes, scheme="label-quantity", classes_per_node=per_node, seed=3
    )
    _assert_disjoint_sorted_int64(parts, len(labels))
    assert sum(map(len, parts)) == len(labels)
    held = [frozenset(labels[part]) for part in parts]
    assert {len(classes) for classes in held} == {per_node}
    assert all(node % 10 in classes for node, classes in enumerate(held))
    for column in _counts(labels, parts).T:
        assert np.ptp(column[column > 0]) <= 1


def test_label_quantity_pairs_overlap_where_those_of_pathological_are_blocks():
    labels = _labels(400, 10)

    def pairs(scheme):
        parts = partition_indices(labels, 100, scheme=scheme, classes_per_node=2)
        return {frozenset(labels[part]) for part in parts}

    blocks, overlapping = pairs("pathological"), pairs("label-quantity")
    assert all(a.isdisjoint(b) for a in blocks for b in blocks if a != b)
    assert any(len(a & b) == 1 for a in overlapping for b in overlapping)
    assert len(overlapping) > 20


def test_two_classes_on_each_of_one_class_alone_are_one():
    assert len(partition_indices(np.zeros(20, dtype=np.int64), 4)) == 4


def test_pathological_works_with_labels_that_are_not_consecutive():
    labels = np.array([3, 7, 9] * 10)
    parts = partition_indices(labels, 3, classes_per_node=1)
    assert [np.unique(labels[part]).tolist() for part in parts] == [[3], [7], [9]]


@settings(max_examples=15, deadline=None)
@given(
    nodes=st.integers(1, 12), seed=st.integers(0, 99), scheme=st.sampled_from(["iid", "dirichlet"])
)
def test_library_schemes_put_every_sample_on_exactly_one_node(nodes, seed, scheme):
    labels = _labels(30, 4)
    parts = partition_indices(labels, nodes, scheme=scheme, seed=seed)
    _assert_disjoint_sorted_int64(parts, len(labels))
    assert sum(map(len, parts)) == len(labels)


def test_iid_gives_equal_shares_of_shuffled_samples():
    labels = np.sort(_labels(100, 10))
    parts = partition_indices(labels, 5, scheme="iid")
    assert [len(part) for part in parts] == [200] * 5
    assert all(len(np.unique(labels[part])) == 10 for part in parts)


@settings(max_examples=15, deadline=None)
@given(nodes=st.integers(1, 12), shards=st.integers(1, 4), seed=st.integers(0, 99))
def test_shards_are_equal_cuts_of_the_samples_sorted_by_label(nodes, shards, seed):
    labels = _labels(31, 4)
    parts = partition_indices(labels, nodes, scheme="shards", classes_per_node=shards, seed=seed)
    _assert_disjoint_sorted_int64(parts, len(labels))
    size = len(labels) // (nodes * shards)
    assert {len(part) for part in parts} == {shards * size}
    assert all(len(np.unique(labels[part])) <= shards * (1 + -(-size // 31)) for part in parts)


def test_smaller_alpha_means_stronger_label_skew():
    labels = _labels(200, 10)

    def largest_share(alpha):
        parts = partition_indices(labels, 10, scheme="dirichlet", alpha=alpha)
        return np.mean([np.bincount(labels[part]).max() / len(part) for part in parts])

    assert largest_share(0.1) > 0.4
    assert largest_share(100.0) < 0.2


@pytest.mark.parametrize("scheme", SEEDED_SCHEMES)
def test_equal_seeds_give_equal_parts_and_other_seeds_others(scheme):
    labels = _labels(50, 5)
    first, again, other = (
        partition_indices(labels, 6, scheme=scheme, seed=seed) for seed in (7, 7, 8)
    )
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("scheme", SEEDED_SCHEMES)
def test_neither_the_global_generator_nor_the_terminal_is_touched(scheme, capfd):
    before = np.random.get_state()[1].copy()  # noqa: NPY002, the global state is what is tested
    partition_indices(_labels(50, 5), 6, scheme=scheme)
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002
    assert capfd.readouterr() == ("", "")


def test_a_bound_leaves_each_node_enough_of_each_class_and_all_samples_in_use():
    """FedLGD's CIFAR10C: three nodes a corruption, at least 100 samples of each class."""
    labels = _labels(600, 10)
    asked = {"scheme": "dirichlet", "alpha": 2.0, "min_of_a_class": 100}
    parts, again, other = (partition_indices(labels, 3, seed=s, **asked) for s in (0, 0, 1))
    counts = _counts(labels, parts)
    assert counts.min() >= 100
    assert (counts.sum(axis=0) == 600).all()
    assert counts.std() > 50
    assert [p.tolist() for p in parts] == [p.tolist() for p in again]
    assert [p.tolist() for p in parts] != [p.tolist() for p in other]


def test_two_classes_by_a_small_alpha_leave_no_node_empty_and_each_node_draws_the_same() -> None:
    """As in FedHEAD's table of texts; one draw in some 8,000 does it."""
    labels = np.repeat([0, 1], 400)
    for seed in range(3):
        first, again = (
            partition_indices(labels, 20, scheme="dirichlet", alpha=0.1, seed=seed)
            for _ in range(2)
        )
        assert min(map(len, first)) > 0
        assert sorted(np.concatenate(first)) == list(range(800))
        assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.parametrize("scheme", ["dirichlet", "pareto"])  # the slowest, and one of our own
def test_a_hundred_nodes_of_sixty_thousand_samples_take_seconds(scheme):
    partition_indices(_labels(50, 5), 6, scheme=scheme)  # imports
    start = time.process_time()
    parts = partition_indices(_labels(6000, 10), 100, scheme=scheme)
    assert time.process_time() - start < 30  # 2 to 10 s, by what else shares the cores
    assert len(parts) == 100


def test_twenty_nodes_of_digits_are_clusters_of_12_5_and_3_with_equal_samples():
    labels = load_dataset("digits").train.labels
    parts = partition_indices(labels, 20, scheme="cluster-mc")
    held = [tuple(np.flatnonzero(row)) for row in _counts(labels, parts)]
    assert held == [(0, 1, 2, 3)] * 12 + [(4, 5, 6)] * 5 + [(7, 8, 9)] * 3
    assert len({len(part) for part in parts}) == 1
    assert len(parts[0]) >= 45


@pytest.mark.parametrize("scheme", ["cluster-bc", "cluster-uc"])
def test_the_main_one_of_five_clusters_has_60_percent_of_the_nodes(scheme):
    labels = _labels(600, 10)
    held = _counts(labels, partition_indices(labels, 100, scheme=scheme)) > 0
    blocks, sizes = np.unique(held, axis=0, return_counts=True)
    assert sorted(sizes) == [10, 10, 10, 10, 60]
    assert (blocks.sum(axis=0) == 1).all()
    assert (blocks.sum(axis=1) == 2).all()


@settings(max_examples=50, deadline=None)
@given(
    nodes=st.integers(3, 30),
    num_classes=st.integers(3, 8),
    ratio=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    scheme=st.sampled_from(["cluster-mc", "cluster-bc"]),
    seed=st.integers(0, 99),
)
def test_nodes_of_a_cluster_share_its_classes_and_all_nodes_have_as_many_samples_as_can_be(
    nodes, num_classes, ratio, scheme, seed
):
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(num_classes), rng.integers(120, 200, num_classes)))
    clusters = ":".join(map(str, ratio))
    parts = partition_indices(labels, nodes, scheme=scheme, clusters=clusters, seed=seed)
    _assert_disjoint_sorted_int64(parts, len(labels))
    each = len(parts[0])
    assert all(len(part) == each for part in parts)
    counts = _counts(labels, parts)
    blocks, cluster_of = np.unique(counts > 0, axis=0, return_inverse=True)
    assert len(blocks) == len(ratio)
    assert (blocks.sum(axis=0) == 1).all()
    spent = []
    for cluster, block in enumerate(blocks):
        own = counts[cluster_of == cluster][:, block]
        assert own.max() - own.min() <= 1
        assert np.ptp(own.sum(axis=0)) <= 1
        left = np.bincount(labels)[block] - own.sum(axis=0)
        spent.append(left.min() < len(own) / block.sum() + 1)
    assert any(spent)  # one more sample a node would be more than some class has


@pytest.mark.parametrize(
    ("nodes", "clusters", "sizes"),
    [(20, "12:5:3", [12, 5, 3]), (5, "12:5:3", [3, 1, 1]), (3, "12:5:3", [1, 1, 1]), (4, "7", [4])],
)
def test_clusters_are_consecutive_nodes_in_the_ratio_and_none_is_empty(nodes, clusters, sizes):
    labels = _labels(60, 6)
    counts = _counts(
        labels, partition_indices(labels, nodes, scheme="cluster-mc", clusters=clusters)
    )
    starts = [0, *np.flatnonzero((np.diff(counts > 0, axis=0)).any(axis=1)) + 1, nodes]
    assert np.diff(starts).tolist() == sizes


@settings(max_examples=30, deadline=None)
@given(nodes=st.integers(5, 40), seed=st.integers(0, 99))
def test_unbalanced_clusters_hold_one_to_five_equal_units_of_each_class(nodes, seed):
    labels = _labels(300, 10, seed)
    parts = partition_indices(labels, nodes, scheme="cluster-uc", seed=seed)
    _assert_disjoint_sorted_int64(parts, len(labels))
    counts = _counts(labels, parts)
    unit = np.gcd.reduce(counts, axis=None)
    assert set(np.unique(counts // unit)) <= {0, 1, 2, 3, 4, 5}
    if nodes >= 20:  # the unit is the largest for which every class suffices
        assert len(np.unique(counts // unit)) > 3
        assert ((unit + 1) * (counts // unit).sum(axis=0) > 300).any()


def test_an_unbalanced_node_draws_its_units_evenly_from_one_to_five_for_each_of_its_classes():
    labels = _labels(3000, 10)
    counts = _counts(labels, partition_indices(labels, 100, scheme="cluster-uc"))
    unit = np.gcd.reduce(counts, axis=None)
    held = (counts // unit)[counts > 0].reshape(100, 2)
    drawn, times = np.unique(held, return_counts=True)
    assert drawn.tolist() == [1, 2, 3, 4, 5]
    assert (abs(times / held.size - 1 / 5) < 0.08).all()
    pairs = {tuple(pair) for pair in held}
    assert len(pairs) > 15  # of 25


@settings(max_examples=30, deadline=None)
@given(
    nodes=st.integers(1, 40),
    per_node=st.integers(1, 6),
    alpha=st.floats(0.2, 5),
    seed=st.integers(0, 99),
)
def test_pareto_gives_every_node_its_classes_and_spends_every_class(nodes, per_node, alpha, seed):
    labels = _labels(100, 6, seed)
    parts = partition_indices(
        labels, nodes, scheme="pareto", classes_per_node=per_node, alpha=alpha, seed=seed
    )
    _assert_disjoint_sorted_int64(parts, len(labels))
    counts = _counts(labels, parts)
    holders = (counts > 0).sum(axis=0)
    assert ((counts > 0).sum(axis=1) == per_node).all()
    assert holders.max() - holders.min() <= 1
    spent = counts.sum(axis=0)
    assert (spent[holders > 0] > 100 - holders[holders > 0]).all()


def test_a_class_is_shared_out_by_sizes_of_nodes_that_follow_a_power_law():
    """Of two classes that all nodes hold, both are shared alike; the tail falls as x^-alpha."""
    labels = _labels(10**6, 2)
    parts = partition_indices(labels, 2000, scheme="pareto", alpha=2.0)
    counts = _counts(labels, parts)
    assert (counts[:, 0] == counts[:, 1]).all()
    sizes = np.sort(counts[:, 0])[::-1] / counts[:, 0].min()
    rank = np.arange(1, 1001)
    slope, _ = np.polyfit(np.log(sizes[:1000]), np.log(rank), 1)
    assert slope == pytest.approx(-2.0, abs=0.2)


def _write(tmp_path, content):
    path = tmp_path / "split.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize("nest", [False, True])
def test_an_index_file_is_followed_as_written(tmp_path, nest):
    clients = {"1": [4, 0], "0": [2, 3]}
    path = _write(tmp_path, {"split": clients} if nest else clients)
    parts = partition_indices(_labels(3, 2), 2, scheme="index-file", index_file=path)
    assert [part.tolist() for part in parts] == [[2, 3], [0, 4]]
    assert all(part.dtype == np.int64 for part in parts)


def test_an_index_file_may_hold_a_single_client(tmp_path):
    path = _write(tmp_path, {"0": [1, 2]})
    (part,) = partition_indices(_labels(3, 2), 1, scheme="index-file", index_file=path)
    assert part.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("content", "client", "problem"),
    [
        ({"0": [0], "1": [6]}, ", client 1", "[6], but the 6 samples"),
        ({"0": [0], "1": [-1]}, ", client 1", "[-1]"),
        ({"0": [0, 1], "1": [1]}, "", "more than once: [1]"),
        ({"0": [0, 0], "1": [1]}, "", "more than once: [0]"),
        ({"0": [0]}, "", "missing: ['1']"),
        ({"0": [0], "1": [1], "2": [2]}, "", "surplus: ['2']"),
        ({"0": [0], "1": [1.5]}, ", client 1", "whole numbers"),
        ({"0": [0], "1": [True]}, ", client 1", "whole numbers"),
        ({"0": [0], "1": 1}, ", client 1", "whole numbers"),
        ([[0], [1]], "", "JSON object"),
    ],
)
def test_a_bad_index_file_is_an_error_at_its_place(tmp_path, content, client, problem):
    path = _write(tmp_path, content)
    with pytest.raises(PartitionError, check=at(f"{path}{client}")) as error:
        partition_indices(_labels(3, 2), 2, scheme="index-file", index_file=path)
    assert problem in error.value.problem


@pytest.mark.parametrize("content", [None, "{", '{"0": [0], "0": [1]}'])
def test_an_index_file_that_cannot_be_read_is_named(tmp_path, content):
    path = tmp_path / "split.json"
    if content:
        _write(tmp_path, content)
    with pytest.raises(PartitionError, check=at("partition.index-file", value=str(path))):
        partition_indices(_labels(3, 2), 2, scheme="index-file", index_file=path)


@pytest.mark.parametrize(
    ("options", "where", "value", "limits"),
    [
        ({"scheme": "odd"}, "partition.scheme", "odd", "pathological, dirichlet, .*, index-file"),
        ({"scheme": "index-file"}, "partition.index-file", None, "JSON"),
        ({"scheme": "dirichlet", "alpha": -1}, "partition.alpha", -1, "> 0.*try 0.1"),
        ({"scheme": "dirichlet", "alpha": math.nan}, "partition.alpha", math.nan, "> 0"),
        ({"scheme": "dirichlet", "alpha": 1e-3}, "partition.alpha", 1e-3, "raise it"),
        ({"scheme": "dirichlet", "min_of_a_class": 1}, "partition.min-of-a-class", 1, "fewer"),
        ({"classes_per_node": 5}, "partition.classes", 5, "1 to 4"),
        ({"classes_per_node": -1}, "partition.classes", -1, "1 to 4"),
        ({"scheme": "shards", "classes_per_node": -1}, "partition.classes", -1, "1 to 2"),
        ({"scheme": "shards", "classes_per_node": 3}, "partition.classes", 3, "1 to 2"),
        ({"scheme": "pareto", "alpha": 0}, "partition.alpha", 0, "> 0"),
        ({"scheme": "pareto", "classes_per_node": 5}, "partition.classes", 5, "1 to 4"),
        ({"scheme": "label-quantity", "classes_per_node": 5}, "partition.classes", 5, "1 to 4"),
        (
            {"scheme": "pareto", "classes_per_node": 3},
            "partition.classes",
            3,
            "class 0 has 10 .*15",
        ),
        ({"scheme": "cluster-bc"}, "partition.clusters", "6:1:1:1:1", "1 to 4"),
        ({"scheme": "cluster-mc", "clusters": "1:0"}, "partition.clusters", "1:0", "1 to 4"),
        ({"scheme": "cluster-mc", "clusters": "a:b"}, "partition.clusters", "a:b", "1 to 4"),
        ({"scheme": "cluster-uc", "clusters": "9:1"}, "partition.scheme", None, "too few"),
        ({"scheme": "cluster-mc", "clusters": "1:1:1:97"}, "partition.scheme", None, "fewer nodes"),
    ],
)
def test_bad_settings_are_errors_with_key_value_and_limits(options, where, value, limits):
    with pytest.raises(PartitionError, check=at(where, value=value), match=limits):
        partition_indices(_labels(10, 4), 20, **options)


@pytest.mark.parametrize("nodes", [0, -1, 41])
def test_the_number_of_nodes_must_be_between_one_and_the_number_of_samples(nodes):
    with pytest.raises(PartitionError, check=at("num-partitions", value=nodes), match="1 to 40"):
        partition_indices(_labels(10, 4), nodes)


def test_no_node_may_be_without_samples_nor_a_class_with_fewer_than_nodes(tmp_path):
    path = _write(tmp_path, {"0": [0], "1": []})
    with pytest.raises(PartitionError, check=at("partition.scheme", value="index-file")):
        partition_indices(_labels(3, 2), 2, scheme="index-file", index_file=path)
    with pytest.raises(PartitionError, match="class 1 has 1 samples for its 2 nodes"):
        partition_indices(np.array([0] * 50 + [1]), 4, classes_per_node=1)


def test_the_settings_know_every_scheme():
    file = "clients.json"
    assert all(PartitionSettings(scheme=s, index_file=file).scheme == s for s in SCHEMES)


@pytest.mark.parametrize("scheme", LIBRARY_SCHEMES)
def test_without_flwr_datasets_its_schemes_name_the_extra_and_the_others_work(scheme, monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr_datasets", None)
    labels = _labels(10, 4)
    with pytest.raises(PartitionError, match=r"flwr-distill\[partitions\]") as caught:
        partition_indices(labels, 4, scheme=scheme, classes_per_node=1)
    assert "\n" not in str(caught.value)
    assert len(partition_indices(labels, 4, scheme="pathological", classes_per_node=2)) == 4


COUNTS = np.array([[40, 0, 10], [0, 0, 90]])


def dots(figure):
    """Areas of the dots by (node, class), and what the legend says: {label: area}."""
    (axes,) = figure.axes
    drawn, *samples_of_sizes = axes.collections
    found = {
        (int(x), int(y)): area
        for (x, y), area in zip(drawn.get_offsets(), drawn.get_sizes(), strict=True)
    }
    return found, {dot.get_label(): dot.get_sizes()[0] for dot in samples_of_sizes}


def test_every_class_on_every_node_is_a_dot_with_an_area_in_proportion_to_its_samples():
    found, legend = dots(partition_picture(COUNTS, "a title"))
    assert found.keys() == {(0, 0), (0, 2), (1, 2)}
    assert found[1, 2] / found[0, 0] == pytest.approx(90 / 40)
    assert found[1, 2] / found[0, 2] == pytest.approx(90 / 10)
    assert legend == {"10": found[0, 2], "40": found[0, 0], "90": found[1, 2]}


@pytest.mark.parametrize("num_nodes", [1, 10, 100, 1000])
@pytest.mark.parametrize("num_classes", [1, 10, 100])
def test_pictures_stay_of_a_size_to_look_at_and_dots_visible(num_nodes, num_classes):
    counts = np.ones((num_nodes, num_classes), dtype=np.int64)
    counts[0, 0] = 5000
    figure = partition_picture(counts, "a title")
    width, height = figure.get_size_inches()
    assert 3 < width < 24
    assert 2 < height < 12
    found, _ = dots(figure)
    assert min(found.values()) >= 1
    assert max(found.values()) >= 100 * (num_nodes * num_classes > 1)
    (axes,) = figure.axes
    assert axes.get_xlim() == (-0.5, num_nodes - 0.5)


def test_dots_do_not_touch_where_there_is_room():
    figure = partition_picture(np.full((20, 10), 7), "a title")
    (axes,) = figure.axes
    column = axes.get_position().width * figure.get_size_inches()[0] * 72 / 20
    assert max(dots(figure)[0].values()) ** 0.5 < column


def test_nodes_share_all_samples_but_those_beyond_the_limit_and_the_reserved_ones():
    labels = np.repeat(np.arange(3), (50, 20, 5))
    shared, reserved = draw_samples(labels)
    assert shared.tolist() == list(range(75))
    assert len(reserved) == 0
    shared, reserved = draw_samples(labels, max_of_a_class=20, reserved=12, seed=3)
    assert (np.diff(shared) > 0).all()
    drawn = np.concatenate([shared, reserved])
    assert (len(shared), len(np.unique(drawn))) == (33, 45)
    assert np.bincount(labels[drawn]).tolist() == [20, 20, 5]
    assert len(np.unique(labels[reserved[:6]])) > 1  # of no class first
    again, other = (draw_samples(labels, max_of_a_class=20, reserved=12, seed=s) for s in (3, 4))
    assert (reserved.tolist(), shared.tolist()) == (again[1].tolist(), again[0].tolist())
    assert set(other[1]) != set(reserved)
    assert set(np.concatenate(other)) != set(drawn)


def test_a_reserve_that_leaves_nodes_nothing_is_refused():
    with pytest.raises(PartitionError, check=at("partition.reserved", value=6)):
        draw_samples(np.arange(20) % 3, max_of_a_class=2, reserved=6)


@pytest.mark.parametrize("name", ["reserved", "max-of-a-class"])
def test_an_index_file_has_all_samples_of_nodes(name):
    own = {"scheme": "index-file", "index-file": "parts.json", name: 3}
    with pytest.raises(SettingsError, check=at(name, value=3)):
        PartitionSettings.checked(own, "run config")
