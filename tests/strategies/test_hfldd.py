"""HFLDD with our real ClientApp; only the wire is replaced, by a grid in memory."""

import json
import logging
import re

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flwr_distill.protocol.replies import NothingUsableError
from flwr_distill.strategies.hfldd import HFLDD
from flwr_distill.strategies.hfldd.clusters import Clusters
from flwr_distill.strategies.hfldd.method import (
    DISTILL,
    LABEL_KNOWLEDGE,
    RECEIVE,
    TRAIN_POOL,
    HFLDDSettings,
)
from flwr_distill.task.datasets import load_dataset
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.partition import partition_indices
from tests.errors import at

from .rounds import FIRST, spoil, start

RUN_CONFIG = {"partition.classes": 2, "train.local-epochs": 1}


def form(strategy, grid):
    """Have the strategy form its clusters, as Flower's loop does in the first round."""
    return list(strategy.configure_train(1, start(), ConfigRecord({"lr": 0.05}), grid))


def quick(**settings):
    defaults = {"distilled_size": 4, "distill_steps": 2, "distiller": "dm"}
    return HFLDD(**{**defaults, **settings})


def classes_of(num_nodes, classes):
    labels = load_dataset("digits").train.labels
    parts = partition_indices(labels, num_nodes, scheme="pathological", classes_per_node=classes)
    return {FIRST + i: set(labels[part].tolist()) for i, part in enumerate(parts)}


@pytest.mark.parametrize("differing", [True, False])
def test_nodes_whose_classes_differ_share_a_cluster_though_their_labels_look_alike(
    differing, caplog
):
    labels = np.random.default_rng(0).dirichlet(np.ones(4), size=(3, 50)).astype(np.float32)
    clusters = Clusters(seed=0)
    alike = dict.fromkeys(range(3), 100.0)  # their halves differ more than they do
    clusters.form(dict(enumerate(labels)), None, alike, complete=True, differing=differing)
    sizes = sorted(len(cluster.nodes) for cluster in clusters)
    assert sizes == ([3] if differing else [1, 1, 1])
    assert ("nothing is distilled" in caplog.text) != differing


@pytest.mark.parametrize("groups", [10, 0])
def test_twenty_nodes_of_one_digit_each_form_pure_groups_and_two_complete_clusters(
    client_grid, groups
):
    grid = client_grid(20, {**RUN_CONFIG, "partition.classes": 1})
    strategy = quick(groups=groups)
    messages = form(strategy, grid)
    held = classes_of(20, 1)
    assert (
        sorted(len({*map(tuple, map(held.get, group))}) for group in strategy.topology.groups)
        == [1] * 10
    )
    for cluster in strategy.topology.clusters:
        assert set.union(*(held[node] for node in (cluster.head, *cluster.members))) == set(
            range(10)
        )
    assert [m.metadata.dst_node_id for m in messages] == list(strategy.topology.heads)


@pytest.mark.parametrize(
    ("nodes", "partition", "groups"),
    [(5, {"partition.classes": 2}, 5), (4, {}, 4), (3, {"partition.scheme": "iid"}, 1)],
    ids=["two digits each", "by default", "all digits each"],
)
def test_nodes_that_all_differ_are_a_group_each_and_nodes_alike_are_one(
    client_grid, nodes, partition, groups
):
    strategy = quick(distill_steps=1)
    form(strategy, client_grid(nodes, {"train.local-epochs": 1, **partition}))
    assert len(strategy.topology.groups) == groups
    assert len(strategy.topology.clusters) == (1 if groups > 1 else nodes)


def test_clusters_that_lack_classes_which_other_nodes_hold_are_a_warning(client_grid, caplog):
    paper = quick(groups=2, complete_clusters=False)
    form(paper, client_grid(4, RUN_CONFIG))
    assert "clusters cannot see all classes that nodes have" in caplog.text
    assert "set hfldd.complete-clusters to true" in caplog.text
    assert re.search(r"that of node \d+ is missing \d, \d, ", caplog.text)


def test_complete_clusters_of_unequal_groups_see_all_classes(client_grid, caplog):
    strategy = quick(groups=2)
    form(strategy, client_grid(4, RUN_CONFIG))
    assert sorted(map(len, strategy.topology.groups)) == [1, 3]
    assert len(strategy.topology.clusters) == 1
    assert "cannot see all classes" not in caplog.text


@pytest.mark.parametrize(("classes", "said"), [(5, True), (2, False)])
def test_few_heads_of_nodes_that_hold_many_classes_are_said(classes, said, client_grid, flower_log):
    flower_log.set_level(logging.INFO)
    grid = client_grid(4, {**RUN_CONFIG, "partition.classes": classes})
    strategy = quick(groups=4)
    form(strategy, grid)
    assert len(strategy.topology.clusters) == 1
    assert ("1 of 4 nodes train a round, and a node has 5 of 10 classes" in flower_log.text) == said


@pytest.mark.parametrize(("complete", "share"), [(True, 0.25), (False, 0.0)])
def test_only_a_head_that_trains_alone_averages_its_last_weights(complete, share, client_grid):
    strategy = quick(groups=2, complete_clusters=complete)
    messages = form(strategy, client_grid(4, RUN_CONFIG))
    assert (len(messages) == 1) == complete
    assert {message.content["config"]["average-last"] for message in messages} == {share}


def test_a_cluster_lacks_what_others_hold_and_nothing_is_known_if_a_node_does_not_say():
    clusters = Clusters(seed=0)
    clusters.form({node: np.eye(2)[[node % 2]] for node in range(4)}, groups=2)
    held = {node: {0, node + 1} for node in range(4)}
    missing = clusters.missing_classes(held)
    for cluster in clusters:
        assert missing[cluster.head] == sorted({1, 2, 3, 4} - {node + 1 for node in cluster.nodes})
    assert clusters.missing_classes({**held, 3: None}) == {}
    assert clusters.missing_classes({node: {0, 1} for node in range(4)}) == {}


def test_members_distil_and_only_heads_receive_and_train(client_grid):
    grid = client_grid(6, RUN_CONFIG)
    strategy = quick(groups=3)
    messages = form(strategy, grid)
    asked = {}
    for message in grid.pushed:
        asked.setdefault(message.metadata.message_type, set()).add(message.metadata.dst_node_id)
    topology = strategy.topology
    assert asked[LABEL_KNOWLEDGE] == {*topology.heads, *topology.head_of}
    assert asked[DISTILL] == set(topology.head_of)
    assert asked[RECEIVE] <= set(topology.heads)
    for message in messages:
        assert message.metadata.message_type == TRAIN_POOL
        config = message.content["config"]
        assert (config["balanced"], config["server-round"]) == (True, 1)


def test_a_head_trains_on_its_own_data_and_what_its_members_sent(client_grid):
    grid = client_grid(4, RUN_CONFIG)
    strategy = quick(groups=2, distilled_size=6)
    replies = grid.send_and_receive(form(strategy, grid))
    own = {
        node: 0.9 * count
        for node, count in zip(range(FIRST, FIRST + 4), _partition_sizes(4), strict=True)
    }
    for reply in replies:
        head = reply.metadata.src_node_id
        members = sum(1 for h in strategy.topology.head_of.values() if h == head)
        expected = own[head] + 6 * members
        assert reply.content["metrics"]["num-examples"] == pytest.approx(expected, abs=1)


def _partition_sizes(num_nodes):
    labels = load_dataset("digits").train.labels
    return [len(p) for p in partition_indices(labels, num_nodes, classes_per_node=2)]


def test_a_node_that_fails_is_left_out_and_the_others_go_on(client_grid):
    def broken(index, message):
        return index == 2 or (index == 3 and message.metadata.message_type == DISTILL)

    grid = client_grid(6, RUN_CONFIG, broken)
    strategy = quick(groups=3)
    messages = form(strategy, grid)
    placed = {*strategy.topology.heads, *strategy.topology.head_of}
    assert placed == {FIRST + index for index in (0, 1, 3, 4, 5)}
    arrays, _ = strategy.aggregate_train(1, grid.send_and_receive(messages))
    assert all(np.isfinite(array.numpy()).all() for array in arrays.values())


def test_a_malformed_reply_is_set_aside_and_the_others_go_on(client_grid):
    grid = client_grid(6, RUN_CONFIG)
    grid.nodes[FIRST] = lambda message: RecordDict()  # nothing at all, to any question
    spoil(grid, FIRST + 1, RecordDict.clear, DISTILL)
    strategy = quick(groups=3)
    form(strategy, grid)
    placed = {*strategy.topology.heads, *strategy.topology.head_of}
    assert placed == {FIRST + index for index in range(1, 6)}
    num_parcels = sum(
        len(message.content.config_records) - 1  # its bounds
        for message in grid.pushed
        if message.metadata.message_type == RECEIVE
    )
    members = set(strategy.topology.head_of)
    assert num_parcels == len(members - {FIRST + 1})


SPOILT_LABELS = {
    "no array": lambda labels: Array("float32", (2, 2), "numpy.ndarray", b"no array"),
    "rows that sum to two": lambda labels: Array(2 * labels),
    "one row that sums to 0.9": lambda labels: Array(np.vstack([labels[:-1], 0.9 * labels[-1:]])),
    "rows of sum one, but below zero": lambda labels: Array(labels - np.eye(10)[0] + np.eye(10)[1]),
    "nan": lambda labels: Array(np.full_like(labels, np.nan)),
    "integers": lambda labels: Array(np.eye(10, dtype=np.int64)[labels.argmax(1)]),
    "a row too few": lambda labels: Array(labels[:-1]),
}


@pytest.mark.parametrize("spoil_labels", SPOILT_LABELS.values(), ids=SPOILT_LABELS)
def test_soft_labels_that_are_no_distributions_are_set_aside(client_grid, spoil_labels):
    grid = client_grid(4, RUN_CONFIG, lambda _, message: message.metadata.message_type == DISTILL)

    def junk(content):
        array = spoil_labels(content["arrays"]["soft-labels"].numpy())
        content["arrays"] = ArrayRecord({"soft-labels": array})

    spoil(grid, FIRST, junk, LABEL_KNOWLEDGE)
    strategy = quick(groups=3, auxiliary_size=20, initial_steps=1)
    with pytest.raises(NothingUsableError):  # of distilling
        form(strategy, grid)
    placed = {*strategy.topology.heads, *strategy.topology.head_of}
    assert placed == {FIRST + index for index in (1, 2, 3)}


def test_a_head_holds_only_what_was_handed_to_it_whatever_it_says(client_grid):
    grid = client_grid(
        6, RUN_CONFIG, lambda index, message: message.metadata.message_type == DISTILL
    )

    def boast(content):
        content["metrics"] = MetricRecord({"kept-parcels": list(range(6))})

    for node in list(grid.nodes):
        spoil(grid, node, boast, RECEIVE)
    strategy = quick(groups=3)
    with pytest.raises(NothingUsableError, match="received no virtual data"):
        form(strategy, grid)
    held = [node for cluster in strategy.state_dict()["clusters"] for node in cluster["held"]]
    assert held == []


def test_raw_data_is_shared_only_when_asked_for(client_grid):
    grid = client_grid(4, RUN_CONFIG)
    strategy = quick(groups=2, share_raw_data=True)
    replies = grid.send_and_receive(form(strategy, grid))
    in_heads = sum(reply.content["metrics"]["num-examples"] for reply in replies)
    assert in_heads == sum(size - int(0.1 * size) for size in _partition_sizes(4))
    assert HFLDD().settings.share_raw_data is False


def test_no_usable_soft_labels_end_the_run_with_the_reason(client_grid):
    grid = client_grid(2, RUN_CONFIG, lambda index, message: True)
    with pytest.raises(NothingUsableError, match="0 of 2 nodes sent usable soft labels"):
        form(quick(), grid)


def test_traffic_formula_uses_the_clusters_as_they_were_formed(client_grid):
    grid = client_grid(6, RUN_CONFIG)
    strategy = quick(groups=3, distilled_size=4)
    assert strategy.expected_bits(1000, 5) == 0
    form(strategy, grid)
    heads, members = len(strategy.topology.heads), len(strategy.topology.head_of)
    soft_labels, distilled = 6 * 1000 * 10 * 32, members * 4 * 64 * 4
    training = heads * 9 * 1000 * 32
    assert strategy.expected_bits(1000, 5) == soft_labels + distilled + training


def test_topology_is_plain_data_with_nodes_by_name(client_grid):
    strategy = quick(groups=2)
    form(strategy, client_grid(4, RUN_CONFIG))
    named = strategy.topology.to_dict({FIRST: "0", FIRST + 1: "1", FIRST + 2: "2"})
    listed = [node for c in named["clusters"] for node in (c["head"], *c["members"])]
    assert sorted(listed) == ["0", "1", str(FIRST + 3), "2"]
    assert json.loads(json.dumps(named)) == named


@pytest.mark.parametrize(
    ("setting", "settings"),
    [
        ("hfldd.complete-clusters", {}),
        ("hfldd.votes", {"votes": True, "rotate": False, "complete_clusters": False}),
    ],
)
def test_settings_that_need_single_models_are_refused_with_secure_sums(setting, settings, a_run):
    with pytest.raises(SettingsError, check=at(setting, value=True)):
        HFLDD.from_run(HFLDDSettings(**settings), a_run(secure_sums=True))
    HFLDD.from_run(HFLDDSettings(complete_clusters=False), a_run(secure_sums=True))
    HFLDD.from_run(HFLDDSettings(heads="all"), a_run(secure_sums=True))
