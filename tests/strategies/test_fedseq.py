"""FedSeq of Chen et al. with our real ClientApp, over a grid in memory."""

import copy
from collections import Counter
from itertools import chain

import numpy as np
import pytest

from flwr_distill.strategies.common.traffic import fedseq_bits
from flwr_distill_baselines.common.passing.strategy import formulas
from flwr_distill_baselines.fedseq import FedSeq
from flwr_distill_baselines.fedseq.method import PASS_ON, TURNS

from .rounds import FIRST, MODEL, assert_equal, play, spoil

RUN_CONFIG = {"partition.classes": 3, "train.local-epochs": 1, "train.batch-size": 64}


def strategy_of(**settings):
    return FedSeq(**{"cluster_size": 3, "links": "relay", "fraction_evaluate": 0.0, **settings})


def around(federation, ring, weights, server_round=1):
    """What a ring makes of the model, and its samples."""
    for node in ring:
        weights = federation.trained(node, weights, server_round).state_dict()
    return sum(federation.size(node) for node in ring), weights


def test_rounds_equal_a_model_that_goes_around_the_same_rings_by_hand(client_grid, by_hand):
    grid, federation = client_grid(6, RUN_CONFIG), by_hand(6, RUN_CONFIG, MODEL)
    strategy = strategy_of()
    arrays, weights, clusters = None, MODEL.state_dict(), []
    for server_round in (1, 2):
        arrays = play(strategy, grid, server_round, arrays)
        clusters.append(copy.deepcopy(strategy.groups))
        rings = [[*others, head] for head, *others in clusters[-1]]
        models = [around(federation, ring, weights, server_round) for ring in rings]
        weights = federation.mean(models)
        assert_equal(arrays, weights, atol=1e-5)
    assert clusters[0] == clusters[1]
    assert [len(cluster) for cluster in clusters[0]] == [3, 3]


def test_the_heads_alone_talk_to_the_server_and_models_pass_as_often_as_in_eq_19(client_grid):
    grid, strategy, rounds = client_grid(6, RUN_CONFIG), strategy_of(), 2
    arrays = None
    for server_round in range(1, rounds + 1):
        arrays = play(strategy, grid, server_round, arrays)
    heads = {cluster[0] for cluster in strategy.groups}
    sent = [m for m in grid.pushed if m.metadata.message_type in (PASS_ON, *vars(TURNS).values())]
    down = [m for m in sent if "arrays" in m.content]
    passed = [m for m in sent if "route" in m.content]
    up = [m for m in sent if m.metadata.message_type == TURNS.last]
    assert {m.metadata.dst_node_id for m in down} == heads
    assert {m.metadata.dst_node_id for m in up} == heads
    assert len(passed) == rounds * 2 * 3  # T O J
    # Eq. 19 has no first model for the two heads: 2T - 1.
    models = len(down) + len(up) - 2 + len(passed)
    assert models * 32 * 100 == fedseq_bits(2, 100, rounds, clients_each=3)
    assert formulas(strategy, 6, 100, rounds) == {
        "fedseq (HFLDD, eq. 19)": fedseq_bits(2, 100, rounds, clients_each=3)
    }


def test_clusters_are_random_of_equal_size_and_cover_all_nodes(client_grid):
    grid = client_grid(7, RUN_CONFIG)
    drawn = []
    for seed in (0, 0, 1):
        strategy = strategy_of(seed=seed)
        strategy.grid = grid
        strategy.form(1)
        drawn.append(strategy.groups)
    assert drawn[0] == drawn[1] != drawn[2]
    assert sorted(map(len, drawn[0])) == [2, 2, 3]
    assert sorted(chain(*drawn[0])) == sorted(grid.get_node_ids())


@pytest.mark.parametrize("kind", [PASS_ON, TURNS.in_turn, TURNS.last])
def test_a_round_goes_on_without_a_node_that_fails(client_grid, by_hand, kind):
    strategy = strategy_of()

    def broken(index, message):
        if message.metadata.message_type != kind:
            return False
        return FIRST + index == strategy._chains[0].nodes[1 if kind == TURNS.in_turn else -1]

    found = play(strategy, client_grid(3, RUN_CONFIG, broken))
    first, second, head = strategy._chains[0].nodes
    taken = {
        PASS_ON: [first, second, head],  # the server sends the model to the first node itself
        TURNS.in_turn: [first, head],
        TURNS.last: [first, second],
    }[kind]
    _, expected = around(by_hand(3, RUN_CONFIG, MODEL), taken, MODEL.state_dict())
    assert_equal(found, expected, atol=1e-5)


@pytest.mark.parametrize("kind", [TURNS.in_turn, TURNS.last])
def test_a_node_whose_loss_is_no_number_costs_the_others_nothing(client_grid, by_hand, kind):
    """In a user's own ServerApp nothing has checked replies before."""
    strategy, grid = strategy_of(seed=1), client_grid(3, RUN_CONFIG)
    play(strategy, grid)
    first, second, head = strategy._chains[0].nodes
    diverges = second if kind == TURNS.in_turn else head

    def diverge(content):
        content["metrics"]["train-loss"] = float("nan")

    spoil(grid, diverges, diverge, kind)
    strategy = strategy_of(seed=1)
    found = play(strategy, grid)
    assert strategy._chains[0].nodes == [first, second, head]
    taken = [first, head] if kind == TURNS.in_turn else [first, second]
    _, expected = around(by_hand(3, RUN_CONFIG, MODEL), taken, MODEL.state_dict())
    assert_equal(found, expected, atol=1e-5)


def test_the_next_of_the_ring_stands_in_for_a_head_that_is_away(client_grid):
    grid, strategy = client_grid(3, RUN_CONFIG), strategy_of()
    everyone = dict(grid.nodes)
    play(strategy, grid)
    ((head, second, third),) = strategy.groups
    grid.nodes = {node: answer for node, answer in everyone.items() if node != head}
    play(strategy, grid, 2)
    assert strategy._chains[0].nodes == [third, second]
    grid.nodes = everyone
    play(strategy, grid, 3)
    assert strategy._chains[0].nodes == [second, third, head]


def test_new_nodes_fill_the_smallest_cluster_and_then_begin_another(client_grid):
    grid, strategy = client_grid(5, RUN_CONFIG), strategy_of(cluster_size=2)
    everyone = dict(grid.nodes)
    grid.nodes = {node: everyone[node] for node in list(everyone)[:3]}
    play(strategy, grid)
    assert sorted(map(len, strategy.groups)) == [1, 2]
    grid.nodes = everyone
    play(strategy, grid, 2)
    assert sorted(map(len, strategy.groups)) == [1, 2, 2]


def test_a_node_alone_in_its_cluster_trains_for_the_server(client_grid, by_hand):
    grid, strategy = client_grid(2, RUN_CONFIG), strategy_of(cluster_size=1)
    found = play(strategy, grid)
    federation = by_hand(2, RUN_CONFIG, MODEL)
    models = [around(federation, cluster, MODEL.state_dict()) for cluster in strategy.groups]
    assert_equal(found, federation.mean(models), atol=1e-5)
    kinds = Counter(message.metadata.message_type for message in grid.pushed)
    assert kinds[PASS_ON] == kinds[TURNS.in_turn] == 0


def test_it_resumes_from_its_state(client_grid):
    grid, strategy, again = client_grid(6, RUN_CONFIG), strategy_of(), strategy_of()
    arrays = play(strategy, grid)
    again.load_state_dict(copy.deepcopy(strategy.state_dict()))
    found, expected = (play(s, grid, 2, arrays) for s in (again, strategy))
    for name, array in expected.items():
        assert np.array_equal(found[name].numpy(), array.numpy())
