"""FedHEAD when leaders and members lie: about samples, norms, and what they averaged."""

import re

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from safetensors.numpy import load, save
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

import flwr_distill.strategies.fedhead.client
from benchmarks.hostile import Attack, Ring
from flwr_distill.protocol.meeting import DESCRIBE
from flwr_distill.strategies.fedhead import FedHEAD
from flwr_distill.strategies.fedhead.method import AGGREGATE_SECTOR, DISTILL_SECTOR, TRAIN_SECTOR
from flwr_distill.strategies.fedhead.screening import Norms, far_longer, longest
from tests.grids import screening_grid

from .rounds import FIRST, MODEL, assert_equal, first_clusters, play, spoil, start

RUN_CONFIG = {"partition.scheme": "iid", "train.local-epochs": 1, "train.batch-size": 64}
START = {name: value.numpy() for name, value in MODEL.state_dict().items()}


def strategy_of(**settings):
    return FedHEAD(distill_epochs=1, least_gain=0.0, **settings)


@pytest.fixture
def grid_of(client_grid):
    """Make nodes; leaders do not distil, unless they shall."""

    def make(nodes=6, distil=False):
        def broken(node, message):
            return not distil and message.metadata.message_type == DISTILL_SECTOR

        return client_grid(nodes, RUN_CONFIG, broken)

    return make


def turn(grid, attack, nodes):
    """Make these nodes hostile, from now on."""
    ring = Ring(attack, len(nodes) / len(grid.nodes))
    for node in nodes:
        grid.nodes[node] = ring.hostile(grid.nodes[node])


def leaders_asked(grid):
    """Nodes that are asked to lead a sector, from now on."""
    asked = []
    for node, answer in list(grid.nodes.items()):

        def noting(message, node=node, answer=answer):
            if message.metadata.message_type in (AGGREGATE_SECTOR, DISTILL_SECTOR):
                asked.append(node)
            return answer(message)

        grid.nodes[node] = noting
    return asked


def largest_change(arrays):
    return max(float(np.abs(arrays[name].numpy() - value).max()) for name, value in START.items())


@pytest.mark.parametrize("distil", [False, True])
def test_a_leader_that_sends_an_absurd_model_spoils_nothing_and_leads_no_more(grid_of, distil):
    grid, strategy = grid_of(distil=distil), strategy_of(sectors=2)
    liars = [cluster.head for cluster in first_clusters(strategy, grid)]
    turn(grid, Attack.LYING_LEADER, liars)
    asked = leaders_asked(grid)
    arrays = None
    for server_round in range(1, 5):
        arrays = play(strategy, grid, server_round, arrays)
        assert largest_change(arrays) < 1
        assert not set(liars) & set(strategy.topology.heads)
        assert set(liars) <= set(asked) if server_round == 1 else not set(liars) & set(asked)
        asked.clear()


def test_a_sector_whose_only_node_lies_takes_no_part_and_the_others_go_on(grid_of, caplog):
    grid, strategy = grid_of(nodes=2), strategy_of(sectors=2)
    turn(grid, Attack.LYING_LEADER, [FIRST])
    arrays = play(strategy, grid)
    play(strategy, grid, 2, arrays)
    assert strategy.topology.heads == (FIRST + 1,)
    assert "takes no part: nobody in it is trusted" in caplog.text


def test_a_liar_that_claims_the_partition_of_another_costs_that_one_nothing(grid_of):
    grid, strategy = grid_of(), strategy_of(sectors=1)
    liar, victim = FIRST, FIRST + 1

    def claim(content):
        content["metrics"]["partition-id"] = 1

    spoil(grid, liar, claim, DESCRIBE)
    strategy.configure_train(1, start(), ConfigRecord(), grid)
    strategy._membership.distrust(liar)
    assert strategy._membership.has_failed(liar)
    assert not strategy._membership.has_failed(victim)


def test_a_student_that_is_absurdly_far_away_is_set_aside(grid_of):
    grid, plain = grid_of(distil=True), grid_of()

    def send_far(content):
        far = {name: array.numpy() + 1e4 for name, array in content["arrays"].items()}
        content["arrays"] = ArrayRecord({n: torch.tensor(a) for n, a in far.items()})

    for node in list(grid.nodes):
        spoil(grid, node, send_far, DISTILL_SECTOR)
    assert_equal(play(strategy_of(), grid), play(strategy_of(), plain))


def test_of_few_nodes_norms_are_compared_with_those_of_earlier_rounds():
    norms = Norms(5.0)
    for told in ({1: 1.0, 2: 1.2}, {1: 0.9, 2: 1.1}):
        norms.begin_round(told)
        assert norms.of_round == told
    norms.begin_round({1: 1.0, 2: 1e4})
    assert norms.of_round == {1: 1.0}
    again = Norms(5.0)
    again.load_state_dict(norms.state_dict())
    again.begin_round({1: 1e9})
    assert again.of_round == {}


def test_who_sends_back_what_it_got_has_no_say_in_its_sector(grid_of, caplog):
    grid, strategy = grid_of(), strategy_of(sectors=1, fixed_leader=True)
    (cluster,) = first_clusters(strategy, grid)
    riders = [cluster.head, cluster.members[0]]
    turn(grid, Attack.FREE_RIDER, riders)
    found = play(strategy, grid)
    for node in riders:
        assert f"node {node} to train.sector rejected: its update is next to" in caplog.text
    away = grid_of()
    for node in riders:
        del away.nodes[node]
    assert_equal(found, play(strategy_of(sectors=1, fixed_leader=True), away), atol=1e-5)


@pytest.mark.parametrize("claim", [10**9, 10**15])
def test_a_claim_of_samples_counts_for_ten_nodes_at_most_and_only_at_the_meeting(grid_of, claim):
    def claiming(grid, *types):
        spoil(grid, FIRST, lambda reply: reply["metrics"].update({"num-examples": claim}), *types)
        return grid

    later = play(strategy_of(), claiming(grid_of(), TRAIN_SECTOR))
    assert_equal(later, play(strategy_of(), grid_of()), atol=0)
    strategy = strategy_of()
    play(strategy, claiming(grid_of(), DESCRIBE))
    counts = strategy._membership.num_examples(grid_of().nodes)
    others = [count for node, count in counts.items() if node != FIRST]
    assert counts[FIRST] <= 10 * max(others)


def test_a_member_that_tells_too_small_a_norm_costs_itself_and_not_its_leader(
    grid_of, monkeypatch, caplog
):
    grid, send = grid_of(), flwr_distill.strategies.fedhead.client.send
    strategy = strategy_of(sectors=1, fixed_leader=True)
    (cluster,) = first_clusters(strategy, grid)
    liar = cluster.members[0]

    def longer(session, route, payload, deadline):
        if session.node_id == liar:
            sent = load(payload)
            payload = save({n: value + 20 * (sent[n] - value) for n, value in START.items()})
        return send(session, route, payload, deadline)

    monkeypatch.setattr(flwr_distill.strategies.fedhead.client, "send", longer)
    found = play(strategy, grid)
    assert strategy.topology.heads == (cluster.head,)
    reason = f"rejected: leader {cluster.head} rejects it: its norm is"
    assert f"node {liar} to train.sector {reason}" in caplog.text
    assert largest_change(found) < 0.1


def test_a_member_with_a_bf16_header_costs_itself_and_not_its_sector(grid_of, monkeypatch, caplog):
    grid, send = grid_of(), flwr_distill.strategies.fedhead.client.send
    strategy = strategy_of(sectors=1, fixed_leader=True)
    (cluster,) = first_clusters(strategy, grid)

    def in_bf16(session, route, payload, deadline):
        if session.node_id == cluster.members[0]:
            payload = save_tensors({n: v.bfloat16() for n, v in load_tensors(payload).items()})
        return send(session, route, payload, deadline)

    monkeypatch.setattr(flwr_distill.strategies.fedhead.client, "send", in_bf16)
    assert play(strategy, grid) is not None
    assert strategy.topology.heads == (cluster.head,)
    assert caplog.text.count(f"leader {cluster.head} rejects it: ") == 1


def test_a_parcel_larger_than_a_model_reaches_no_leader(grid_of, monkeypatch, caplog):
    """Its leader would have to hold it, whatever it made of it."""
    monkeypatch.setattr("benchmarks.hostile.OVERSIZED_BYTES", 2**20)
    grid, strategy = grid_of(), strategy_of(sectors=1, fixed_leader=True)
    (cluster,) = first_clusters(strategy, grid)
    hostile = cluster.members[0]
    turn(grid, Attack.OVERSIZED_PARCEL, [hostile])
    screening = screening_grid(grid, deadline=60, model=START)
    assert play(strategy, screening) is not None
    assert re.search(
        rf"node {hostile} to train.sector rejected: its parcel of \d+ bytes is", caplog.text
    )
    assert "rejects it" not in caplog.text


def test_what_a_leader_says_of_its_models_is_booked_only_if_its_mean_counts(grid_of, caplog):
    grid, strategy = grid_of(), strategy_of(sectors=2)
    liar, honest = (cluster.head for cluster in first_clusters(strategy, grid))

    def blame(content):
        content["config"]["rejected.1"] = "\n\x1b[31mI do not like it" * 9

    for node in (liar, honest):
        spoil(grid, node, blame, AGGREGATE_SECTOR)
    turn(grid, Attack.LYING_LEADER, [liar])
    play(strategy, grid)
    assert f"leader {liar} rejects it" not in caplog.text
    (line,) = [line for line in caplog.messages if f"leader {honest} rejects it" in line]
    assert line.isprintable()
    assert len(line) < 400


@pytest.mark.parametrize("rule", ["agreement", "multi-krum"])
def test_reversed_models_of_a_third_are_not_averaged(grid_of, rule, caplog):
    settings = {"sectors": 1, "fixed_leader": True, "rule": rule}
    grid = grid_of()
    turn(grid, Attack.REVERSED, (FIRST + 4, FIRST + 5))
    strategy = strategy_of(**settings)
    found = play(strategy, grid)
    for node in (FIRST + 4, FIRST + 5):
        assert f"node {node} to train.sector rejected: leader " in caplog.text
    plain = play(strategy_of(sectors=1, fixed_leader=True), grid_of())
    step = {name: plain[name].numpy() - value for name, value in START.items()}
    along = sum(float((step[n] * (found[n].numpy() - START[n])).sum()) for n in START)
    length = sum(float((step[n] ** 2).sum()) for n in START)
    assert along > 0.8 * length  # with the plain mean it is a third


@pytest.mark.parametrize(("nodes", "colluders"), [(8, 0), (10, 1)])
def test_the_mean_of_a_suspected_leader_is_that_of_most_witnesses(
    grid_of, caplog, nodes, colluders
):
    grid, strategy = grid_of(nodes=nodes), strategy_of(sectors=2, audit=True)
    first, second = first_clusters(strategy, grid)
    liar, other = first.head, second.head
    turn(grid, Attack.REVERSING_LEADER, [liar, *first.members[:colluders]])
    found = play(strategy, grid)
    assert f"node {liar} to train.aggregate_sector rejected: its mean is not that of" in caplog.text
    assert f"node {other} to train.aggregate_sector rejected" not in caplog.text
    assert_equal(found, play(strategy_of(sectors=2), grid_of(nodes=nodes)))
    play(strategy, grid, 2, found)
    assert liar not in strategy.topology.heads


def test_two_of_five_and_one_that_went_astray_are_told_apart_among_all_nodes():
    """Lengths of a sector and of the other, with a replaced model (digits, seed 0, round 5)."""
    sector = [1.72, 8.52, 1.41, 35.5, 23.53]
    told = dict(enumerate([*sector, 2.0, 1.75, 1.25, 1.29, 1.24]))
    samples = dict.fromkeys(told, 130)
    assert far_longer(dict(enumerate(sector)), samples) == []
    assert far_longer(told, samples) == [3, 4]
    assert longest(told, samples) == 1.72
    assert far_longer({0: 1.0, 1: 1e9}, samples) == []


def test_agreement_leaves_out_two_far_longer_models_of_one_sector(grid_of, caplog):
    grid = grid_of(nodes=10)
    strategy = strategy_of(sectors=2, rule="agreement", norm_threshold=0.0)
    (cluster, _) = first_clusters(strategy, grid)
    hostile = cluster.members[:2]
    turn(grid, Attack.LONG, hostile)
    play(strategy, grid)
    assert strategy._norms.of_round.keys() == grid.nodes.keys() - set(hostile)
    for node in hostile:
        assert f"node {node} to train.sector rejected: its norm is far above" in caplog.text
