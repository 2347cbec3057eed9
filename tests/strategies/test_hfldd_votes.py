"""HFLDD does not believe virtual data: models that never saw them vote."""

import dataclasses

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, MetricRecord

from benchmarks.hostile import Attack, Ring
from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.strategies.hfldd import HFLDD
from flwr_distill.strategies.hfldd.client import knows
from flwr_distill.strategies.hfldd.clusters import LiveCluster
from flwr_distill.strategies.hfldd.method import VOTE, VOTES
from flwr_distill.strategies.hfldd.voting import contradicted, note_verdicts, verdicts, voters

from .rounds import spoil, start

RUN_CONFIG = {
    "partition.classes": 5,
    "train.local-epochs": 5,
    "train.lr": 0.05,
    "train.batch-size": 16,
}


def test_labels_of_chance_or_flipped_ones_are_out_and_honest_ones_are_not():
    votes = {
        1: {11: [0.7, 0.68, 0.2], 12: [0.38, 0.5, 0.3]},
        2: {21: [0.75, 0.9, 0.7], 22: [0.66, 0.7, 0.9]},
        3: {31: [0.72, 0.72, 0.72], 32: [0.5, 0.54, 0.49]},
    }
    assert verdicts(votes) == {
        1: {11: False, 12: True},
        2: {21: False, 22: False},
        3: {31: False, 32: True},
    }


def test_models_that_know_nothing_yet_decide_nothing():
    assert verdicts({1: {11: [0.5, 0.55, 0.5]}, 2: {21: [0.52, 0.1, 0.6]}}) == {}
    assert verdicts({}) == {}


def test_a_head_with_many_members_that_lies_about_all_harms_only_its_own():
    liar = {1: {node: [0.0] * 3 for node in range(100, 120)}}
    honest = {head: {head * 10: [0.7] * 3} for head in (2, 3)}
    judged = verdicts(liar | honest)
    assert all(judged[1].values())
    assert judged[2] == {20: False}
    assert judged[3] == {30: False}


def test_an_alarm_names_data_that_every_voter_contradicts():
    assert contradicted({1: {11: [0.3], 12: [0.6]}, 2: {21: [0.2, 0.5]}}) == [11]


def test_of_two_voters_the_kinder_one_counts():
    assert verdicts({1: {11: [0.1, 0.8]}, 2: {21: [0.8, 0.7]}})[1] == {11: False}


def test_two_clusters_are_asked_until_models_know_enough_and_leave_out_nothing(caplog):
    by_head = {1: LiveCluster([1, 11], 1, {1: [11]}), 2: LiveCluster([2, 21], 2, {2: [21]})}
    note_verdicts({1: {11: [0.3]}, 2: {21: [0.5]}}, by_head, decisive=False)
    assert [cluster.undecided for cluster in by_head.values()] == [[11], [21]]
    assert len(caplog.messages) == 1
    assert "node 11 may be spoiled" in caplog.text
    note_verdicts({1: {11: [0.3]}, 2: {21: [0.9]}}, by_head, decisive=False)
    assert [cluster.undecided for cluster in by_head.values()] == [[], []]
    assert [cluster.left_out for cluster in by_head.values()] == [[], []]


def test_voters_are_those_that_hold_most_of_the_classes_and_never_the_head_itself():
    alike = {head: [0, 1, 2] for head in range(9)}
    draws = [voters(3, alike, np.random.default_rng(seed)) for seed in range(8)]
    assert all(len(set(drawn)) == 3 and 3 not in drawn for drawn in draws)
    assert len({tuple(sorted(drawn)) for drawn in draws}) > 1
    others = {0: [0, 1], 1: [1], 2: [5, 6, 7], 3: [0, 1], 4: [0]}
    assert voters(0, others, np.random.default_rng(0))[0] == 3
    assert 2 not in voters(0, others, np.random.default_rng(0))


def test_a_model_that_knows_the_classes_votes_higher_and_classes_count_alike():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 4, bias=False))
    model[1].weight.data = torch.eye(4)
    images = torch.eye(4)[[0, 0, 0, 1]].reshape(4, 1, 2, 2)
    labels = torch.tensor([0, 0, 0, 1])
    parcel = VirtualData(images, labels, "dm", steps=0, seed=0, init="noise")
    assert knows(model, range(4), parcel) == 1.0
    wrong = dataclasses.replace(parcel, labels=torch.tensor([0, 0, 0, 2]))
    assert knows(model, [0], wrong) == 1.0  # it cannot judge the others
    assert knows(model, [3], wrong) == 1.0
    assert knows(model, range(4), wrong) == pytest.approx((1 + 1 / 3) / 2)


VOTING = {"votes": True, "rotate": False, "complete_clusters": False}


def strategy_of(grid, **settings):
    """HFLDD with small virtual data, and its messages of the first round."""
    strategy = HFLDD(groups=2, distilled_size=20, distill_steps=20, **VOTING, **settings)
    return strategy, configured(strategy, grid, 1, start())


def configured(strategy, grid, server_round, arrays):
    return list(strategy.configure_train(server_round, arrays, ConfigRecord(), grid))


def asked(grid, message_type):
    return [m for m in grid.pushed if m.metadata.message_type == message_type]


@pytest.mark.parametrize(("nodes", "left_out"), [(10, True), (4, False)])
def test_flipped_virtual_data_are_left_out_from_the_next_round_on_unless_there_are_two_clusters(
    client_grid, caplog, nodes, left_out
):
    grid = client_grid(nodes, RUN_CONFIG)
    ring, last = Ring(Attack.FLIPPED_VIRTUAL_DATA, 0.1), list(grid.nodes)[-1]
    grid.nodes[last] = ring.hostile(grid.nodes[last])
    strategy, messages = strategy_of(grid)
    head = strategy.topology.head_of[last]  # in other words, it is a member
    replies = grid.send_and_receive(messages)
    arrays, _ = strategy.aggregate_train(1, replies)
    assert ("are voted out" in caplog.text) == left_out
    if left_out:
        assert all(f"node {last} " in line for line in caplog.messages if "Virtual data" in line)
    before = {r.metadata.src_node_id: r.content["metrics"]["num-examples"] for r in replies}
    restored = HFLDD(groups=2, **VOTING)
    restored.load_state_dict(strategy.state_dict())
    messages = configured(strategy, grid, 2, arrays)
    assert [m.content["config"] for m in messages] == [
        m.content["config"] for m in configured(restored, grid, 2, arrays)
    ]
    replies = grid.send_and_receive(messages)
    after = {r.metadata.src_node_id: r.content["metrics"]["num-examples"] for r in replies}
    assert after == {**before, head: before[head] - 20 * left_out}
    strategy.aggregate_train(2, replies)
    if left_out:  # all is decided in the first round
        assert len(asked(grid, VOTE)) == len(strategy.topology.clusters)


@pytest.mark.parametrize("votes", [[], [0.5] * 7])
def test_a_head_that_sends_votes_in_another_number_is_replaced(client_grid, caplog, votes):
    grid = client_grid(6, RUN_CONFIG)
    strategy, messages = strategy_of(grid)
    liar = strategy.topology.heads[0]

    def miscount(content):
        content["metrics"] = MetricRecord({VOTES: votes})

    spoil(grid, liar, miscount, VOTE)
    arrays, _ = strategy.aggregate_train(1, grid.send_and_receive(messages))
    assert f"Reply of node {liar} to {VOTE} rejected" in caplog.text
    assert "voted out" not in caplog.text
    configured(strategy, grid, 2, arrays)
    assert liar not in strategy.topology.heads
