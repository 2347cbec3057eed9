"""FedSeq with our real ClientApp; only the wire is replaced, by a grid in memory."""

import copy
from collections import Counter

import numpy as np
import pytest
import torch
from flwr.app import Array, ConfigRecord, Message, MetricRecord, RecordDict

import flwr_distill_baselines.common.passing.client
from flwr_distill.client.training import soft_labels
from flwr_distill.protocol.registry import all_methods, phases_of
from flwr_distill.protocol.replies import NothingUsableError
from flwr_distill.task.datasets import auxiliary_images
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.models import create_model
from flwr_distill_baselines.common.passing.strategy import formulas
from flwr_distill_baselines.fedseq_zaccone import FedSeq
from flwr_distill_baselines.fedseq_zaccone.method import REPORT_CONFIDENCE, TURNS
from tests.grids import screening_grid

from .rounds import FIRST, MODEL, SPEC, assert_equal, play, start

PASS_AGAIN, TRAIN_IN_TURN, TRAIN_LAST = TURNS.again, TURNS.in_turn, TURNS.last
RUN_CONFIG = {"partition.classes": 3, "train.local-epochs": 1, "train.batch-size": 64}
HERE = {"peer-address": "here:1"}


def strategy_of(**settings):
    return FedSeq(
        **{
            "num_classes": 10,
            "least_samples": 10_000,
            "most_nodes": 3,
            "pretraining_epochs": 1,
            "auxiliary_size": 20,
            "links": "relay",
            "fraction_evaluate": 0.0,
            **settings,
        }
    )


def trained_in_turn(federation, nodes, weights, server_round=1):
    """The model that passes through some nodes, by hand."""
    for node in nodes:
        weights = federation.trained(node, weights, server_round).state_dict()
    return sum(federation.size(node) for node in nodes), weights


def kinds(grid):
    return Counter(message.metadata.message_type for message in grid.pushed)


@pytest.mark.parametrize("over", ["relay", "direct"])
def test_two_rounds_equal_models_passed_by_hand(client_grid, by_hand, direct, over):
    grid = client_grid(5, RUN_CONFIG, node_config=HERE if over == "direct" else None)
    federation, strategy = by_hand(5, RUN_CONFIG, MODEL), strategy_of(links=over)
    arrays, weights, orders = start(), MODEL.state_dict(), []
    for server_round in (1, 2):
        arrays = play(strategy, grid, server_round, arrays)
        orders.append([chain.nodes for chain in strategy._chains])
        models = [trained_in_turn(federation, c, weights, server_round) for c in orders[-1]]
        weights = federation.mean(models)
        assert_equal(arrays, weights, atol=1e-5)
    assert sorted(map(len, orders[0])) == [2, 3]
    assert orders[0] != orders[1]
    assert [sorted(chain) for chain in orders[0]] == [sorted(chain) for chain in orders[1]]
    # 5 nodes, 2 superclients: in each round three nodes pass the model on, two send it up
    assert kinds(grid)[TRAIN_IN_TURN] == 6
    assert kinds(grid)[TRAIN_LAST] == 4
    sent = [
        m.content for m in grid.pushed if m.metadata.message_type.startswith("train.fedseq_zaccone")
    ]
    assert sum("arrays" in content for content in sent) == 4  # to the first nodes alone


def test_nodes_tell_what_a_model_trained_on_their_data_predicts(client_grid, by_hand):
    grid, federation = client_grid(4, RUN_CONFIG), by_hand(4, RUN_CONFIG, MODEL)
    strategy = strategy_of(pretraining_epochs=2)
    play(strategy, grid)
    for node, session in federation.sessions.items():
        told = strategy._confidences[node]
        expected = soft_labels(
            create_model("auto", SPEC, seed=session.task.seed),
            session.data.train,
            auxiliary_images("noise", SPEC, 20, session.task.seed),
            steps=2 * -(-federation.size(node) // 64),
            lr=session.task.train.lr,
            batch_size=64,
            generator=session.generator("fedseq-confidence"),
        ).mean(0)
        torch.testing.assert_close(torch.tensor(told), expected, atol=1e-6, rtol=0)


def failing(strategy, *when):
    """A node breaks if its place in its superclient and the kind of message are among `when`."""

    def broken(index, message):
        kind = message.metadata.message_type
        for chain in strategy._chains:
            if FIRST + index in chain.nodes:
                return (chain.nodes.index(FIRST + index), kind) in when
        return False

    return broken


@pytest.mark.parametrize(
    ("when", "taken"),
    [
        ([(1, TRAIN_IN_TURN)], [0, 2, 3]),  # the node before it passes its model again
        ([(0, TRAIN_IN_TURN)], [1, 2, 3]),
        ([(0, TRAIN_IN_TURN), (1, TRAIN_IN_TURN)], [2, 3]),
        ([(3, TRAIN_LAST)], [0, 1, 2]),  # the server gets the model of the node before
        ([(1, TRAIN_IN_TURN), (0, PASS_AGAIN)], [2, 3]),  # it is lost with its holder
    ],
)
def test_a_round_goes_on_without_nodes_that_fail(client_grid, by_hand, when, taken):
    strategy = strategy_of(most_nodes=4)
    grid = client_grid(4, RUN_CONFIG, failing(strategy, *when))
    found = play(strategy, grid)
    (chain,) = strategy._chains
    federation = by_hand(4, RUN_CONFIG, MODEL)
    nodes = [chain.nodes[place] for place in taken]
    assert chain.trained == nodes
    _, expected = trained_in_turn(federation, nodes, MODEL.state_dict())
    assert_equal(found, expected, atol=1e-5)


def test_a_node_that_always_fails_has_its_turn_in_ever_fewer_rounds(client_grid):
    """All others of its superclient wait for it."""

    def broken(index, message):
        return index == 1 and message.metadata.message_type in (TRAIN_IN_TURN, TRAIN_LAST)

    strategy, grid, asked = strategy_of(), client_grid(3, RUN_CONFIG, broken), []
    for server_round in range(1, 10):
        assert play(strategy, grid, server_round) is not None
        if any(FIRST + 1 in chain.nodes for chain in strategy._chains):
            asked.append(server_round)
    assert asked == [1, 2, 4, 8]


def test_a_superclient_that_is_lost_leaves_the_others(client_grid, by_hand):
    strategy = strategy_of()
    grid = client_grid(5, RUN_CONFIG)
    play(strategy, grid)
    lost = strategy.groups[0]
    grid.nodes = {node: answer for node, answer in grid.nodes.items() if node not in lost}
    found = play(strategy, grid, 2)
    (chain,) = strategy._chains
    federation = by_hand(5, RUN_CONFIG, MODEL)
    _, expected = trained_in_turn(federation, chain.nodes, MODEL.state_dict(), 2)
    assert_equal(found, expected, atol=1e-5)


def test_a_round_without_any_model_changes_nothing(client_grid):
    kinds = (TRAIN_IN_TURN, TRAIN_LAST, PASS_AGAIN)
    broken = lambda index, message: message.metadata.message_type in kinds  # noqa: E731
    assert play(strategy_of(), client_grid(4, RUN_CONFIG, broken)) is None


def test_a_run_in_which_no_node_tells_anything_ends(client_grid):
    broken = lambda index, message: message.metadata.message_type == REPORT_CONFIDENCE  # noqa: E731
    with pytest.raises(NothingUsableError, match="from 4 nodes"):
        play(strategy_of(), client_grid(4, RUN_CONFIG, broken))


HOSTILE = {
    "other names": lambda arrays: {"odd": np.zeros(3, np.float32)},
    "other shapes": lambda arrays: {n: a[None] for n, a in arrays.items()},
    "absurdly large": lambda arrays: {n: a * np.float32(1e30) for n, a in arrays.items()},
    "NaN": lambda arrays: {n: np.full_like(a, np.nan) for n, a in arrays.items()},
}


@pytest.mark.parametrize("how", HOSTILE)
def test_a_bad_model_of_the_node_before_is_rejected_and_training_starts_again(
    client_grid, by_hand, how, monkeypatch, flower_log
):
    strategy, real = strategy_of(most_nodes=4), flwr_distill_baselines.common.passing.client.sent
    grid = client_grid(4, RUN_CONFIG)

    def sent(session, content, model, deadline):
        (chain,) = strategy._chains
        if session.node_id == chain.nodes[0]:
            model = HOSTILE[how]({n: np.array(a) for n, a in model.items()})
        return real(session, content, model, deadline)

    monkeypatch.setattr(flwr_distill_baselines.common.passing.client, "sent", sent)
    found = play(strategy, grid)
    (chain,) = strategy._chains
    assert chain.trained == chain.nodes[2:]
    federation = by_hand(4, RUN_CONFIG, MODEL)
    _, expected = trained_in_turn(federation, chain.nodes[2:], MODEL.state_dict())
    assert_equal(found, expected, atol=1e-5)
    assert "rejects its group's model" in flower_log.text


@pytest.mark.parametrize("last_fails", [False, True])
def test_a_superclient_whose_model_is_absurdly_large_is_set_aside(
    client_grid, by_hand, monkeypatch, flower_log, last_fails
):
    """Whether its last node sends it, or the one before where that failed."""
    strategy = strategy_of(most_nodes=2, least_samples=10_000)
    honest = client_grid(12, {**RUN_CONFIG, "partition.classes": 2})
    everyone = dict(honest.nodes)
    play(strategy, honest, 1)
    bad = set(strategy.groups[0])

    def spoiling(node):
        def answer(message):
            kind = message.metadata.message_type
            if last_fails and node in bad and kind == TRAIN_LAST:
                raise RuntimeError("this node is broken")
            content = everyone[node](message)
            if node in bad and "arrays" in content:
                for name, array in content["arrays"].items():
                    content["arrays"][name] = Array(array.numpy() * np.float32(1e6))
            return content

        return answer

    honest.nodes = {node: spoiling(node) for node in everyone}
    found = play(strategy, honest, 2)
    assert "norm is beyond norm-threshold" in flower_log.text
    assert max(float(np.abs(array.numpy()).max()) for array in found.values()) < 10


def test_bytes_that_are_no_model_are_rejected(client_grid, monkeypatch):
    real = flwr_distill_baselines.common.passing.client.sent
    monkeypatch.setattr(
        flwr_distill_baselines.common.passing.client,
        "sent",
        lambda s, r, payload, d: real(s, r, b"\x01", d),
    )
    strategy = strategy_of(most_nodes=4)
    play(strategy, client_grid(3, RUN_CONFIG))
    (chain,) = strategy._chains
    assert chain.trained == [chain.nodes[2]]  # which started again


def test_over_direct_links_a_node_that_cannot_be_reached_is_left_out(client_grid, direct, by_hand):
    grid, strategy = (
        client_grid(4, RUN_CONFIG, node_config=HERE),
        strategy_of(most_nodes=4, links="direct"),
    )
    play(strategy, grid)
    (group,) = strategy.groups
    order = np.random.default_rng([0, 2])
    order.permutation(1)
    nodes = [group[i] for i in order.permutation(4)]
    direct.append(nodes[2])
    found = play(strategy, grid, 2)
    (chain,) = strategy._chains
    assert chain.nodes == nodes
    assert chain.trained == [nodes[0], nodes[1], nodes[3]]
    _, expected = trained_in_turn(by_hand(4, RUN_CONFIG, MODEL), chain.trained, start_weights(), 2)
    assert_equal(found, expected, atol=1e-5)


def start_weights():
    return MODEL.state_dict()


def test_links_that_must_be_direct_need_addresses_in_the_first_round(client_grid):
    with pytest.raises(SettingsError, match=r"links = 'direct': node .* has no address"):
        play(strategy_of(links="direct"), client_grid(4, RUN_CONFIG))


@pytest.mark.parametrize(
    "confidence", [[0.1] * 9, [0.2] * 10, [], [0.1] * 11, [0.5] + [0.0] * 9, None]
)
def test_what_is_no_distribution_over_the_classes_is_set_aside(memory_grid, confidence, flower_log):
    def tells(values):
        metrics = {"num-examples": 5}
        if values is not None:
            metrics["confidence"] = values
        return lambda message: RecordDict({"metrics": MetricRecord(metrics)})

    grid = memory_grid({1: tells(confidence), 2: tells([0.1] * 10)})
    strategy = strategy_of()
    strategy.grid = grid
    assert strategy._confidences_of([1, 2]) == {2: [0.1] * 10}
    assert "no distribution" in flower_log.text


@pytest.mark.parametrize(
    "values", [[float("nan")] * 10, [-0.1] * 10, [2.0] * 10, "all", [0.1] * 20_000]
)
def test_confidences_are_checked_before_the_strategy_sees_them(memory_grid, values):
    def tells(message):
        if values == "all":
            return RecordDict({"metrics": ConfigRecord({"confidence": "all"})})
        metrics = {"num-examples": 5, "confidence": values}
        return RecordDict({"metrics": MetricRecord(metrics)})

    phases = phases_of(all_methods()["fedseq-zaccone"])
    screening = screening_grid(memory_grid({FIRST: tells}), deadline=5, phases=phases, model={})
    (reply,) = screening.send_and_receive([Message(RecordDict(), FIRST, REPORT_CONFIDENCE)])
    assert reply.has_error()


def test_a_new_node_joins_and_a_lost_one_is_left_out_until_it_is_back(client_grid):
    grid, strategy = client_grid(5, RUN_CONFIG), strategy_of()
    everyone = dict(grid.nodes)
    late, lost = FIRST + 4, FIRST
    grid.nodes = {node: everyone[node] for node in everyone if node != late}
    play(strategy, grid, 1)
    assert sum(map(len, strategy.groups)) == 4
    grid.nodes = {node: everyone[node] for node in everyone if node != lost}
    play(strategy, grid, 2)
    assert sorted(n for group in strategy.groups for n in group) == sorted(everyone)
    assert lost not in {node for chain in strategy._chains for node in chain.nodes}
    grid.nodes = everyone
    play(strategy, grid, 3)
    assert {node for chain in strategy._chains for node in chain.nodes} == set(everyone)
    assert kinds(grid)[REPORT_CONFIDENCE] == 5


def test_a_share_of_the_superclients_trains(client_grid):
    grid, strategy = client_grid(6, RUN_CONFIG), strategy_of(most_nodes=2, fraction_train=0.67)
    for server_round in (1, 2, 3):
        play(strategy, grid, server_round)
        assert len(strategy._chains) == 2
    assert len(strategy.groups) == 3


def test_it_goes_on_from_its_state_as_if_it_had_not_stopped(client_grid):
    grid, strategy = client_grid(4, RUN_CONFIG), strategy_of(most_nodes=2)
    arrays = play(strategy, grid)
    again = strategy_of(most_nodes=2)
    again.load_state_dict(copy.deepcopy(strategy.state_dict()))
    found, expected = (play(s, grid, 2, arrays) for s in (again, strategy))
    for name, array in expected.items():
        assert np.array_equal(found[name].numpy(), array.numpy())
    assert kinds(grid)[REPORT_CONFIDENCE] == 4
    assert again.state_dict() == strategy.state_dict()


def test_samples_count_as_told_at_the_first_meeting(client_grid):
    """A node that claims a million samples weighs ten times the median, as elsewhere."""
    grid, strategy = client_grid(4, RUN_CONFIG), strategy_of(most_nodes=2)
    everyone = dict(grid.nodes)

    def boasting(message):
        content = everyone[FIRST](message)
        if "describe" in message.metadata.message_type:
            content["metrics"]["num-examples"] = 10**6
        return content

    grid.nodes[FIRST] = boasting
    play(strategy, grid)
    others = sorted(strategy._num_examples[FIRST + i] for i in (1, 2, 3))
    assert strategy._num_examples[FIRST] <= 10 * others[-1]


def test_the_report_has_the_bytes_of_eq_19(client_grid):
    strategy = strategy_of(most_nodes=2)
    assert formulas(strategy, 4, 100, 3) == {}
    play(strategy, client_grid(4, RUN_CONFIG))
    # O |w| B1 ((2T - 1) + T J) with O = 2, |w| = 100, T = 3, J = 2
    assert formulas(strategy, 4, 100, 3) == {"fedseq (HFLDD, eq. 19)": 2 * 100 * 32 * (5 + 3 * 2)}
