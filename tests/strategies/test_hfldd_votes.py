"""HFLDD believes neither virtual data nor heads: votes, and the server's own test samples."""

import dataclasses

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord

from benchmarks.hostile import Attack, Ring
from client.hfldd import knows
from distill.virtual_data import VirtualData
from protocol.arrays import as_arrays, as_record
from protocol.hfldd import VOTE, VOTES, Distillation
from strategies.hfldd import HFLDD
from strategies.hfldd.votes import Tested, spoiled, verdicts, voters
from task.datasets import load_dataset
from task.models import create_model

MODEL = create_model("auto", load_dataset("digits").spec, seed=0)
START = {name: value.numpy() for name, value in MODEL.state_dict().items()}
RUN_CONFIG = {"partition.classes": 5, "train.local-epochs": 2, "train.lr": 0.1}


def test_labels_of_chance_or_flipped_ones_are_out_and_honest_ones_are_not():
    votes = {
        1: {11: [0.7, 0.68, 0.2], 12: [0.38, 0.5, 0.3]},
        2: {21: [0.75, 0.9, 0.7], 22: [0.66, 0.7, 0.9]},
        3: {31: [0.7, 0.7, 0.7], 32: [0.5, 0.54, 0.52]},
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


def test_of_two_voters_the_kinder_one_counts():
    assert verdicts({1: {11: [0.1, 0.8]}, 2: {21: [0.8, 0.7]}})[1] == {11: False}


def test_voters_are_drawn_or_those_that_test_best_and_never_the_head_itself():
    draws = np.random.default_rng(0)
    drawn = voters(3, range(9), None, {}, draws)
    assert len(set(drawn)) == 3
    assert 3 not in drawn
    tested = {head: Tested(0.5, 2.0 + head / 10) for head in range(9)}
    assert voters(0, range(9), Tested(0.1, 2.25), tested, draws) == [1, 2]


def test_a_head_much_worse_than_its_start_and_the_others_is_spoiled_and_a_beginner_is_not():
    start = Tested(0.6, 1.0)
    heads = {1: Tested(0.62, 0.9), 2: Tested(0.3, 1.8)}
    assert spoiled(start, heads) == [2]
    assert spoiled(Tested(0.1, 2.3), heads) == []
    assert spoiled(start, {1: Tested(0.3, 1.8)}) == []
    assert spoiled(start, {1: Tested(0.35, 1.7), 2: Tested(0.3, 1.8)}) == []


def test_a_model_that_knows_the_classes_votes_higher_and_classes_count_alike():
    class Seen(torch.nn.Module):
        weight = torch.nn.Parameter(torch.ones(()))

        def forward(self, images):
            return images.flatten(1)

    images = torch.eye(4)[[0, 0, 0, 1]].reshape(4, 1, 2, 2)
    labels = torch.tensor([0, 0, 0, 1])
    parcel = VirtualData(images, labels, "dm", steps=0, seed=0, init="noise")
    assert knows(Seen(), parcel) == 1.0
    wrong = dataclasses.replace(parcel, labels=torch.tensor([0, 0, 0, 2]))
    assert knows(Seen(), wrong) == pytest.approx((1 + 1 / 3) / 2)


def strategy_of(grid, **settings):
    """HFLDD with small virtual data, and its messages of the first round."""
    distillation = Distillation(distilled_size=20, distill_steps=20)
    strategy = HFLDD(groups=2, distillation=distillation, votes=True, **settings)
    return strategy, configured(strategy, grid, 1, ArrayRecord(MODEL.state_dict()))


def configured(strategy, grid, server_round, arrays):
    return list(strategy.configure_train(server_round, arrays, ConfigRecord(), grid))


def asked(grid, message_type):
    return [m for m in grid.pushed if m.metadata.message_type == message_type]


@pytest.mark.parametrize(("nodes", "left_out"), [(10, True), (4, False)])
def test_flipped_virtual_data_are_left_out_from_the_next_round_on_and_two_clusters_raise_an_alarm(
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
    assert ("nothing is left out" in caplog.text) != left_out
    assert all(f"node {last} " in line for line in caplog.messages if "Virtual data" in line)
    samples = {r.metadata.src_node_id: r.content["metrics"]["num-examples"] for r in replies}
    restored = HFLDD(groups=2, votes=True)
    restored.load_state_dict(strategy.state_dict())
    for going_on in (strategy, restored):
        (message,) = [
            m for m in configured(going_on, grid, 2, arrays) if m.metadata.dst_node_id == head
        ]
        (reply,) = grid.send_and_receive([message])
        assert samples[head] - reply.content["metrics"]["num-examples"] == 20 * left_out
    strategy.aggregate_train(2, grid.send_and_receive(configured(strategy, grid, 2, arrays)))
    assert len(asked(grid, VOTE)) == len(strategy.topology.clusters)  # once, in the first round


def test_a_head_that_spoils_the_servers_accuracy_is_set_aside_and_another_leads(
    client_grid, caplog
):
    def evaluate(server_round, record):
        size = max(float(np.abs(array.numpy()).max()) for array in record.values())
        if size == 0:
            return MetricRecord({"accuracy": 0.1, "loss": 9.0})
        at_start = all(np.array_equal(record[name].numpy(), START[name]) for name in START)
        numbers = (0.6, 1.0) if at_start else (0.8, 0.5)
        return MetricRecord(dict(zip(("accuracy", "loss"), numbers, strict=True)))

    grid = client_grid(4, RUN_CONFIG)
    strategy, messages = strategy_of(grid, evaluate=evaluate)
    honest, hostile = strategy.topology.heads
    replies = {r.metadata.src_node_id: r for r in grid.send_and_receive(messages)}
    trained = as_arrays(replies[honest].content["arrays"])
    zeros = {name: np.zeros_like(array) for name, array in trained.items()}
    replies[hostile].content["arrays"] = as_record(zeros)
    arrays, _ = strategy.aggregate_train(1, replies.values())
    assert f"Model of head {hostile} set aside: its test accuracy is 0.10" in caplog.text
    for name, array in trained.items():
        np.testing.assert_array_equal(arrays[name].numpy(), array)
    configured(strategy, grid, 2, arrays)
    assert strategy.topology.heads[0] == honest
    assert strategy.topology.heads[1] != hostile


@pytest.mark.parametrize("votes", [[], [0.5] * 7])
def test_votes_in_another_number_than_asked_for_are_set_aside(client_grid, caplog, votes):
    grid = client_grid(6, RUN_CONFIG)
    strategy, messages = strategy_of(grid)
    liar = strategy.topology.heads[0]
    honest = grid.nodes[liar]

    def answer(message):
        content = honest(message)
        if message.metadata.message_type == VOTE:
            content["metrics"] = MetricRecord({VOTES: votes})
        return content

    grid.nodes[liar] = answer
    strategy.aggregate_train(1, grid.send_and_receive(messages))
    assert f"Votes of head {liar} set aside" in caplog.text
    assert "voted out" not in caplog.text
