"""Which codec ``auto`` chooses: the rule against an independent one, and what a lie may change."""

import math
from statistics import median_high
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Message, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from flwr_distill.protocol.arrays import as_arrays, as_record
from flwr_distill.protocol.messages import ARRAYS, METRICS
from flwr_distill.server.auto_codecs import (
    LADDER,
    MAX_NODES,
    AutoCodecs,
    Ways,
    as_coded,
    auto_codecs_of,
    cost_of,
)
from flwr_distill.server.grid.codec import ModelCodec
from flwr_distill.server.settings import RunSettings

RNG = np.random.default_rng(0)
EARLIER = {"w": RNG.standard_normal((30, 40)).astype(np.float32), "n": np.arange(3)}
MODEL = {"w": EARLIER["w"] + RNG.standard_normal((30, 40)).astype(np.float32) / 9, "n": np.ones(3)}
accuracies = st.integers(0, 1000).map(lambda n: n / 1000)
rows = st.lists(st.tuples(accuracies, accuracies), min_size=1, max_size=7)


def as_scores(rows):
    exact = {node: before for node, (before, _) in enumerate(rows)}
    return exact, {node: after for node, (_, after) in enumerate(rows)}


@given(rows)
def test_the_cost_is_the_upper_median_of_losses(rows):
    losses = [before - after for before, after in rows]
    assert cost_of(*as_scores(rows)) == median_high(losses)


@given(rows, st.data())
def test_a_lying_minority_moves_the_cost_no_further_than_honest_nodes_losses(honest, data):
    most = (len(honest) - 1) // 2
    liars = data.draw(st.lists(st.tuples(accuracies, accuracies), max_size=most))
    losses = [before - after for before, after in honest]
    assert min(losses) <= cost_of(*as_scores([*honest, *liars])) <= max(losses)


def test_of_two_nodes_the_one_that_loses_more_counts():
    assert cost_of(*as_scores([(0.9, 0.9), (0.9, 0.5)])) == pytest.approx(0.4)


def test_nodes_that_evaluate_only_the_exact_model_make_a_codec_too_costly():
    exact, tried = as_scores([(0.9, 0.9)] * 3)
    assert cost_of(exact, {0: tried[0], 1: tried[1]}) == 0
    assert cost_of(exact, {0: tried[0]}) == math.inf


def test_a_node_that_is_silent_is_not_waited_for_again_nor_for_long():
    silent = {1: 2}  # from its second question on
    grid = Grid(3, lambda node, error: 0.9 if not error else 0.5, silent)
    _, choice = checked(grid)
    assert [len(nodes) for nodes in grid.asked] == [3, 3, 2, 2]
    assert grid.timeouts[0] is None
    assert all(30 <= timeout < 60 for timeout in grid.timeouts[1:])
    assert choice["nodes_counted"] == 3


def test_a_check_that_finds_all_nodes_busy_comes_a_round_later():
    auto = AutoCodecs(ModelCodec(), Ways(True, True, True), 0)
    auto._unneeded = ""
    grid = Grid(3, lambda node, error: 0.9)
    model, earlier = as_record(MODEL), as_record(EARLIER)
    grid.busy = {0, 1, 2}
    assert auto.end_round(1, earlier, model, grid) is None
    assert not grid.asked
    grid.busy = frozenset()
    assert auto.end_round(2, earlier, model, grid)


@pytest.mark.parametrize("name", LADDER)
@pytest.mark.parametrize("delta", [True, False])
def test_the_model_that_is_judged_is_as_far_off_as_its_codec_may_make_it(name, delta):
    model, earlier = as_record(MODEL), as_record(EARLIER)
    record, share = as_coded(
        model, earlier, name, Ways(True, True, delta), np.random.default_rng(1)
    )
    own = as_arrays(record)
    np.testing.assert_array_equal(own["n"], MODEL["n"])
    steps = {"int4": 1 / 7, "int8": 1 / 127, "float16": 2**-10}[name]
    change = np.abs(MODEL["w"] - EARLIER["w"]).max(axis=1, keepdims=True)
    coded = change * (1 + steps) if delta else np.abs(MODEL["w"]).max(1, keepdims=True) + change
    bound = steps * (change + coded) + 1e-6
    error = np.abs(own["w"] - MODEL["w"])
    assert (error <= bound).all()
    assert error.max() > 0
    assert share < {"int4": 0.2, "int8": 0.35, "float16": 0.6}[name]


class Grid:
    """Nodes that score a model by how far it is from the exact one."""

    busy = frozenset()

    def __init__(self, num_nodes, accuracy, silent_from=()):
        self.nodes, self.accuracy, self.asked = range(num_nodes), accuracy, []
        self.silent_from, self.timeouts = dict(silent_from), []

    def get_node_ids(self):
        return [*self.nodes]

    def ask_aside(self, messages, timeout):
        self.asked.append([message.metadata.dst_node_id for message in messages])
        self.timeouts.append(timeout)
        replies = []
        for message in messages:
            if len(self.asked) >= self.silent_from.get(message.metadata.dst_node_id, math.inf):
                continue
            weights = as_arrays(message.content[ARRAYS])["w"]
            error = float(np.abs(weights - MODEL["w"]).max())
            accuracy = self.accuracy(message.metadata.dst_node_id, error)
            numbers = MetricRecord({"eval-accuracy": accuracy})
            replies.append(Message(RecordDict({METRICS: numbers}), reply_to=message))
        return replies


def checked(grid, seed=0):
    auto = AutoCodecs(ModelCodec(), Ways(True, True, True), seed)
    auto._unneeded = ""
    return auto, auto.end_round(1, as_record(EARLIER), as_record(MODEL), grid)


def error_of(name):
    record, _ = as_coded(
        as_record(MODEL),
        as_record(EARLIER),
        name,
        Ways(True, True, True),
        np.random.default_rng(5),
    )
    return float(np.abs(as_arrays(record)["w"] - MODEL["w"]).max())


@pytest.mark.parametrize(
    ("tolerated", "chosen"),
    [(1.0, "int4"), (3 * error_of("int8"), "int8"), (3 * error_of("float16"), "float16")],
)
def test_the_smallest_codec_that_costs_under_half_a_point_is_used(tolerated, chosen):
    auto, choice = checked(Grid(3, lambda node, error: 0.9 if error <= tolerated else 0.8))
    assert (auto.codec.down, auto.codec.up) == (f"delta-{chosen}", chosen)
    assert [one["name"] for one in choice["tried"]] == [*LADDER[: LADDER.index(chosen) + 1]]


def test_half_a_point_is_too_much_and_float32_is_left():
    auto, choice = checked(Grid(3, lambda node, error: 0.9 if error == 0 else 0.895 - 1e-9))
    assert (auto.codec.down, auto.codec.up) == ("float32", "float32")
    assert choice["reason"]
    assert len(choice["tried"]) == len(LADDER)


@pytest.mark.parametrize("odd", [math.nan, -1.0, 2.0, math.inf, 0.0, 1.0])
def test_whatever_one_node_of_three_says_the_others_choose(odd):
    auto, _ = checked(Grid(3, lambda node, error: odd if node == 2 and error else 0.9))
    assert auto.codec.up == "int4"
    auto, _ = checked(Grid(3, lambda node, error: 0.9 if not error else odd if node == 2 else 0.5))
    assert auto.codec.up == "float32"


def test_few_of_many_nodes_are_asked_and_one_seed_asks_the_same():
    asked = []
    for seed in (0, 0, 1):
        grid = Grid(1000, lambda node, error: 0.9)
        checked(grid, seed)
        assert all(len(nodes) == MAX_NODES for nodes in grid.asked)
        asked.append(grid.asked)
    assert asked[0] == asked[1] != asked[2]


def test_a_round_that_changed_nothing_puts_the_check_off():
    auto = AutoCodecs(ModelCodec(), Ways(True, True, True), 0)
    auto._unneeded = ""
    grid, model = Grid(3, lambda node, error: 0.9), as_record(MODEL)
    rounds = [n for n in range(1, 12) if auto.end_round(n, model, model, grid)]
    assert rounds == []
    earlier = as_record(EARLIER)
    assert [n for n in range(12, 60) if auto.end_round(n, earlier, model, grid)] == [12, 24, 48]


@pytest.mark.parametrize(("fraction", "delta"), [(1.0, True), (0.5, True), (0.1, False)])
def test_differences_are_for_runs_where_most_nodes_train(fraction, delta):
    settings = RunSettings(
        down_codec="auto", up_codec="int8", fraction_train=fraction, num_rounds=1
    )
    auto = auto_codecs_of(settings, ModelCodec(), personal=False)
    assert auto.ways == Ways(down=True, up=False, delta=delta)


@pytest.mark.parametrize(
    ("able", "remote", "chooses"), [({1, 2}, {2}, True), ({1, 2}, set(), False), ((), (), False)]
)
def test_one_node_beyond_loopback_is_enough_to_choose(able, remote, chooses):
    auto = AutoCodecs(ModelCodec(), Ways(True, True, True), 0)
    auto.meet(SimpleNamespace(with_codecs=able, over_networks=remote))
    assert auto.codec.is_used == chooses
    grid = Grid(3, lambda node, error: 0.9)
    auto.end_round(1, as_record(EARLIER), as_record(MODEL), grid)
    assert bool(grid.asked) == chooses
    assert (auto.codec.up == "int4") == chooses


def test_named_codecs_are_not_chosen():
    assert auto_codecs_of(RunSettings(down_codec="int8"), ModelCodec(), personal=False) is None
