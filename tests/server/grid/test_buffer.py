"""Rounds that end with some replies: who is asked, what counts, and what a late update is worth."""

import time

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.stragglers import Clock, play
from flwr_distill.protocol.arrays import as_arrays, as_record
from flwr_distill.protocol.registry import find_method
from flwr_distill.server.grid.buffer import Buffer, buffer_of, rebased, staleness_weight
from flwr_distill.server.grid.grid import RunGrid
from flwr_distill.server.grid.transport import Transport
from flwr_distill.server.settings import RunSettings
from flwr_distill.simulation.grid import SimulationGrid
from flwr_distill.task.errors import SettingsError
from tests.errors import at

START = {"w": np.array([1.0, 2.0], dtype=np.float32), "n": np.array(3)}
SECONDS = {1: 1.0, 2: 2.0, 3: 5.0}


def model(value):
    return {"w": np.full(2, value, dtype=np.float32), "n": np.array(int(value))}


def trained(message):
    """A node's reply: its start, one more."""
    start = as_arrays(message.content.array_records["arrays"])
    arrays = {name: array + np.ones_like(array) for name, array in start.items()}
    return RecordDict({"arrays": as_record(arrays), "metrics": MetricRecord({"num-examples": 10})})


class Rounds:
    """Rounds of a grid whose nodes take SECONDS for a message."""

    def __init__(self, size, *, max_staleness=10, nodes=None, deadline=60.0):
        nodes = nodes or dict.fromkeys(SECONDS, trained)
        self.clock = Clock(nodes, SECONDS)
        self.buffer = Buffer(("train",), size, max_staleness)
        transport = Transport(SimulationGrid(list(SECONDS), self.clock), deadline)
        self.grid = RunGrid(transport, phases={}, buffer=self.buffer)
        self.number = 0

    def ask(self, value=None, message_type="train"):
        """Replies of a round, by node; its start is a model of `value`, by default its number."""
        if message_type == "train":
            self.number += 1
            self.grid.begin_round(self.number)
        arrays = as_record(model(self.number if value is None else value))
        messages = [
            Message(RecordDict({"arrays": arrays, "config": ConfigRecord()}), node, message_type)
            for node in SECONDS
        ]
        replies = self.grid.send_and_receive(messages)
        return {reply.metadata.src_node_id: reply for reply in replies}


def arrays_of(reply):
    return as_arrays(reply.content.array_records["arrays"])


@given(st.integers(0, 50), st.lists(st.floats(-9, 9, width=32), min_size=6, max_size=6))
def test_a_late_update_moves_this_rounds_model_and_weighs_less_the_later_it_is(late, numbers):
    now, start, end = (np.array(numbers[i : i + 2], dtype=np.float32) for i in (0, 2, 4))
    found = rebased({"w": end}, {"w": start}, {"w": now})["w"]
    np.testing.assert_allclose(
        found, [n + (e - s) for n, s, e in zip(now, start, end, strict=True)]
    )
    assert staleness_weight(late) == pytest.approx((1 + late) ** -0.5)


def test_a_round_ends_with_so_many_replies_and_nodes_that_train_get_no_other_message():
    rounds = Rounds(2)
    assert set(rounds.ask()) == {1, 2}
    assert rounds.clock.now == 2.0
    assert set(rounds.ask()) == {1, 2}
    assert rounds.clock.now == 4.0
    assert rounds.clock.count[3] == 1
    assert set(rounds.ask()) == {1, 3}  # of the first round, at 5.0


def test_a_late_reply_counts_as_its_update_of_this_rounds_model_and_for_less():
    rounds = Rounds(2)
    for _ in range(2):
        rounds.ask()
    replies = rounds.ask()
    late, own = replies[3], replies[1]
    np.testing.assert_array_equal(arrays_of(late)["w"], [4.0, 4.0])  # 3 + (2 - 1)
    np.testing.assert_array_equal(arrays_of(own)["w"], [4.0, 4.0])
    assert late.content["metrics"]["num-examples"] == pytest.approx(10 / np.sqrt(3))
    assert own.content["metrics"]["num-examples"] == 10


def test_a_reply_that_is_too_late_is_rejected_and_its_node_asked_again():
    rounds, rejected = Rounds(1, max_staleness=1), 0
    for _ in range(9):
        replies = rounds.ask()
        if 3 in replies:
            rejected += 1
            assert replies[3].has_error()
            assert any("max-staleness is 1" in reason for reason in rounds.grid.failures[3])
    assert rejected > 1


def test_other_phases_ask_only_nodes_that_do_not_train():
    rounds = Rounds(2)
    rounds.ask()
    assert set(rounds.ask(message_type="evaluate")) == {1, 2}


def test_a_node_that_never_replies_is_named_after_its_deadline_and_holds_nobody_up():
    nodes = {1: trained, 2: trained, 3: lambda message: None}
    rounds = Rounds(2, nodes=nodes, deadline=0.3)
    for _ in range(3):
        assert set(rounds.ask()) == {1, 2}
    time.sleep(0.4)
    rounds.ask()
    assert any("did not reply to train" in reason for reason in rounds.grid.failures[3])
    assert rounds.clock.count[3] == 1
    rounds.ask()
    assert rounds.clock.count[3] == 2


def test_no_model_of_an_earlier_round_stays_in_memory_but_those_that_nodes_train():
    rounds = Rounds(2)
    for _ in range(8):
        rounds.ask()
    assert rounds.buffer.inbox._messages.keys() == rounds.buffer.pending.keys()
    assert len(rounds.buffer.pending) <= 1


def test_a_second_reply_to_a_message_counts_for_nothing():
    class Twice(SimulationGrid):
        def pull_messages(self, message_ids):
            return [reply for reply in super().pull_messages(message_ids) for _ in range(2)]

    grid = Twice(list(SECONDS), Clock(dict.fromkeys(SECONDS, trained), SECONDS))
    replies = RunGrid(Transport(grid, 60.0), phases={}).send_and_receive(
        [Message(RecordDict({"arrays": as_record(model(1))}), node, "train") for node in SECONDS]
    )
    assert [reply.metadata.src_node_id for reply in replies] == sorted(SECONDS)


def test_with_as_many_replies_as_nodes_a_run_learns_what_a_plain_run_learns():
    config = {"dataset": "digits", "strategy": "fedavg", "num-rounds": 2, "fraction-evaluate": 0.0}
    plain, all_of_them = play(config), play({**config, "buffer": 10})
    assert plain == all_of_them


def test_fast_nodes_do_not_wait_for_slow_ones_and_the_model_learns_sooner():
    config = {"dataset": "digits", "strategy": "fedavg", "fraction-evaluate": 0.0, "seed": 1}
    waiting = play({**config, "num-rounds": 3})
    buffered = play({**config, "num-rounds": 20, "buffer": 3})
    at_most = [accuracy for time, accuracy in buffered if time <= waiting[-1][0]]
    assert max(at_most) > waiting[-1][1]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"strategy": "hfldd"}, "take .*fedavg"),
        ({"strategy": "scaffold"}, "fedavg"),
        ({"strategy": "flwr.serverapp.strategy:FedAvg"}, "fedavg"),
        ({"strategy": "fedavg", "secure-sums": True}, "secure-sums"),
        ({"strategy": "fedavg", "quorum": 0.5}, "quorum"),
        ({"strategy": "fedavg", "edge": "socket"}, "edge"),
    ],
)
def test_what_needs_all_replies_of_a_round_is_refused_with_the_remedy(settings, words):
    run = RunSettings.from_run_config({"buffer": 3, **settings})
    strategy = settings["strategy"]
    method = None if ":" in strategy else find_method(strategy)
    with pytest.raises(SettingsError, match=words, check=at("buffer", value=3)):
        buffer_of(run, method)
