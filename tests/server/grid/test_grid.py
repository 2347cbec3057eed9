"""The grid of a run and its ledger."""

import random
import time

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import sample_nodes

from flwr_distill.protocol.registry import find_method, phases_of
from flwr_distill.server.grid.grid import RunGrid
from flwr_distill.server.grid.ledger import DIRECT, DOWN, RELAYED, UP
from flwr_distill.server.grid.pipeline import QuorumError
from flwr_distill.server.grid.transport import Transport
from flwr_distill.server.record.journal import Journal
from flwr_distill.strategies.common.waiting import TooFewNodesError
from tests.errors import at
from tests.grids import plain_grid


def reply_with(**metrics):
    return lambda message: RecordDict({"metrics": MetricRecord(metrics)})


def messages_to(nodes, message_type="train", **config):
    record = RecordDict({"config": ConfigRecord(config)})
    return [Message(record, node, message_type) for node in nodes]


def test_replies_come_in_the_order_of_the_nodes_whoever_is_faster(memory_grid):
    inner = memory_grid({node: reply_with(node=node) for node in (3, 1, 2)})
    inner.reverse = True
    grid = plain_grid(inner, deadline=5)
    grid.nodes.order = {2: 0, 3: 1, 1: 2}
    replies = grid.send_and_receive(messages_to([1, 2, 3]))
    assert [reply.content["metrics"]["node"] for reply in replies] == [2, 3, 1]


def test_a_phase_ends_at_its_deadline_without_the_nodes_that_do_not_reply(memory_grid, caplog):
    inner = memory_grid({1: reply_with(x=1), 2: lambda message: None})
    begin = time.monotonic()
    replies = plain_grid(inner, deadline=0.3).send_and_receive(messages_to([1, 2]), timeout=60)
    assert 0.3 <= time.monotonic() - begin < 2
    assert [reply.metadata.src_node_id for reply in replies] == [1]


@pytest.mark.parametrize(("deadline", "timeout"), [(60, 0.3), (0.3, 60), (0.3, None)])
def test_of_a_phases_timeout_and_the_grids_deadline_the_shorter_counts(
    memory_grid, caplog, deadline, timeout
):
    inner = memory_grid({1: reply_with(x=1), 2: lambda message: None})
    begin = time.monotonic()
    grid = plain_grid(inner, deadline=deadline)
    replies = grid.send_and_receive(messages_to([1, 2]), timeout=timeout)
    assert 0.3 <= time.monotonic() - begin < 2
    assert [reply.metadata.src_node_id for reply in replies] == [1]
    assert [message.metadata.ttl for message in inner.pushed] == [0.3, 0.3]


def test_messages_expire_with_the_deadline_so_that_no_node_works_for_a_past_phase(memory_grid):
    inner = memory_grid({1: reply_with(x=1)})
    plain_grid(inner, deadline=7).send_and_receive(messages_to([1]))
    assert inner.pushed[0].metadata.ttl == 7


def test_a_message_that_expires_before_the_deadline_is_not_kept_longer(memory_grid):
    inner = memory_grid({1: reply_with(x=1)})
    (message,) = messages_to([1])
    message.metadata.ttl = 3
    plain_grid(inner, deadline=7).send_and_receive([message])
    assert inner.pushed[0].metadata.ttl == 3


def test_replies_are_looked_for_often_at_first_and_after_each_and_seldom_in_between(
    memory_grid, monkeypatch
):
    waits = []

    class Slow(type(memory_grid({}))):
        def pull_messages(self, message_ids):
            return super().pull_messages(message_ids) if len(waits) in (40, 80) else []

    monkeypatch.setattr(time, "sleep", waits.append)
    grid = plain_grid(Slow({1: reply_with(x=1), 2: reply_with(x=1)}), deadline=60)
    assert len(grid.send_and_receive(messages_to([1, 2]))) == 2
    first, second = waits[:40], waits[40:]
    assert len(second) == 40
    for waited in (first, second):
        assert waited == sorted(waited)
        assert waited[0] <= 0.05
        assert waited[-1] == 0.5


def test_an_error_reply_is_passed_on_to_the_strategy(memory_grid):
    def broken(message):
        raise ValueError("no data")

    inner = memory_grid({1: broken, 2: reply_with(x=1)})
    replies = plain_grid(inner, deadline=5).send_and_receive(messages_to([1, 2]))
    assert [reply.has_error() for reply in replies] == [True, False]


def test_an_error_that_the_superlink_sends_for_a_lost_node_bears_that_nodes_id(memory_grid, caplog):
    class ForLostNodes(type(memory_grid({}))):
        def pull_messages(self, message_ids):
            for reply in super().pull_messages(message_ids):
                reply.metadata.__dict__["_src_node_id"] = 1  # the SuperLink's own
                yield reply

    def lost(message):
        raise ConnectionError("node 7 is gone")

    grid = plain_grid(ForLostNodes({7: lost}), deadline=5)
    (reply,) = grid.send_and_receive(messages_to([7]))
    assert reply.metadata.src_node_id == 7
    assert "node 7 is gone" in reply.error.reason
    assert "did not reply" not in caplog.text


def test_a_message_that_the_superlink_does_not_take_is_not_waited_for(memory_grid, caplog):
    class Refusing(type(memory_grid({}))):
        def push_messages(self, messages):
            taken = super().push_messages(messages)
            return [
                "" if m.metadata.dst_node_id == 2 else i
                for i, m in zip(taken, messages, strict=True)
            ]

    inner = Refusing({1: reply_with(x=1), 2: lambda message: None})
    begin = time.monotonic()
    (reply,) = plain_grid(inner, deadline=20).send_and_receive(messages_to([1, 2]))
    assert time.monotonic() - begin < 10
    assert reply.metadata.src_node_id == 1
    assert "continues without 1 of 2 nodes" in caplog.text


def test_no_message_means_no_wait(memory_grid):
    assert plain_grid(memory_grid({}), deadline=5).send_and_receive([]) == []


def test_nodes_come_in_the_rosters_order_and_strangers_after_them(memory_grid):
    grid = plain_grid(memory_grid({node: reply_with(x=1) for node in (9, 4, 7, 2)}), deadline=5)
    grid.nodes.order = {7: 0, 2: 1}
    assert grid.get_node_ids() == [7, 2, 4, 9]


def train(grid, nodes, message_type="train"):
    return grid.send_and_receive(messages_to(nodes, message_type))


@pytest.mark.parametrize(
    ("quorum", "asked", "replied", "needed"),
    [
        (0.0, 4, 0, None),
        (0.5, 4, 2, None),
        (0.5, 4, 1, 2),
        (0.5, 5, 2, 3),
        (1.0, 3, 2, 3),
        (0.28, 25, 7, None),  # 0.28 * 25 is 7.000000000000001
        (0.28, 25, 6, 7),
    ],
)
def test_a_training_phase_with_fewer_replies_than_the_quorum_is_a_named_error(
    memory_grid, tmp_path, quorum, asked, replied, needed
):
    def broken(message):
        raise ValueError("no data")

    nodes = {node: reply_with(x=1) if node < replied else broken for node in range(asked)}
    journal = Journal(tmp_path / "journal.jsonl")
    journal.round = 3
    grid = plain_grid(memory_grid(nodes), deadline=9, quorum=quorum, journal=journal)
    if needed is None:
        assert len(train(grid, nodes)) == asked
        return
    with pytest.raises(QuorumError, check=at("quorum", value=quorum)) as error:
        train(grid, nodes)
    assert error.value.problem.startswith(f"round 3, train: {replied} of {asked} nodes sent")
    assert f", {needed} must" in error.value.problem


def test_nodes_that_are_late_do_not_count_for_the_quorum(memory_grid):
    inner = memory_grid({1: reply_with(x=1), 2: lambda message: None})
    fedlgd = phases_of(find_method("fedlgd"))
    grid = plain_grid(inner, deadline=0.2, quorum=1.0, phases=fedlgd)
    with pytest.raises(QuorumError, match=r"train\.virtual: 1 of 2 nodes .* within 0 s"):
        train(grid, [1, 2], "train.virtual")


@pytest.mark.parametrize("phase", ["evaluate", "query.describe", "train.distill"])
def test_phases_in_which_single_nodes_work_for_others_need_no_quorum(memory_grid, phase):
    inner = memory_grid({1: lambda message: None})
    assert train(plain_grid(inner, deadline=0.1, quorum=1.0), [1], phase) == []


def test_replies_that_are_screened_off_do_not_count_for_the_quorum(memory_grid):
    class Screening:
        def check(self, message, reply):
            return ""

        def compare(self, phase, messages, replies, connected):
            return {1: "hostile"}

    inner = memory_grid({1: reply_with(x=1), 2: reply_with(x=1)})
    with pytest.raises(QuorumError, match="1 of 2"):
        train(RunGrid(Transport(inner, deadline=5), Screening(), quorum=1.0), [1, 2])


def test_sampling_from_no_nodes_at_all_ends_with_a_named_error(memory_grid):
    inner = memory_grid({1: reply_with(x=1)})
    grid = plain_grid(inner, deadline=0.5)
    train(grid, [1])
    inner.nodes = {}
    begin = time.monotonic()
    with pytest.raises(TooFewNodesError, match=r"no node .* phase-timeout = 0 s"):
        sample_nodes(grid, min_available_nodes=1, sample_size=1)
    assert 0.5 < time.monotonic() - begin < 3


def test_a_federation_is_alone_only_since_its_last_node_left(memory_grid):
    inner = memory_grid({})
    grid = plain_grid(inner, deadline=0.4)
    assert grid.get_node_ids() == []
    inner.nodes = {1: reply_with(x=1)}
    time.sleep(0.5)
    assert grid.get_node_ids() == [1]
    inner.nodes = {}
    time.sleep(0.6)
    assert grid.get_node_ids() == []


def test_sampling_does_not_wait_for_a_node_that_left_since_it_was_counted(memory_grid):
    inner = memory_grid({node: reply_with(x=1) for node in (1, 2, 3)})
    grid = plain_grid(inner, deadline=60)
    counted = len(grid.get_node_ids())
    del inner.nodes[3]
    begin = time.monotonic()
    sampled, _ = sample_nodes(grid, min_available_nodes=1, sample_size=counted)
    assert sorted(sampled) == [1, 2, 3]
    assert time.monotonic() - begin < 0.5


def test_each_phase_looks_for_nodes_anew(memory_grid):
    inner = memory_grid({1: reply_with(x=1)})
    grid = plain_grid(inner, deadline=5)
    assert grid.get_node_ids() == [1]
    inner.nodes[2] = reply_with(x=1)
    train(grid, [1])
    assert grid.get_node_ids() == [1, 2]


def test_nodes_are_sampled_alike_in_each_phase_whatever_else_drew_in_between(memory_grid):
    def sampled(noise):
        inner = memory_grid({node: reply_with(x=1) for node in range(50)})
        grid, drawn = plain_grid(inner, deadline=5, seed=3), []
        for _ in range(3):
            drawn.append(random.sample(grid.get_node_ids(), 10))
            for _ in range(noise):
                random.random()  # as Flower's retries do
            grid.send_and_receive(messages_to(drawn[-1]))
        return drawn

    assert sampled(noise=0) == sampled(noise=7)
    assert sampled(noise=0)[0] != sampled(noise=0)[1]


def test_ledger_counts_the_bytes_of_all_records_by_phase_and_link(memory_grid):
    weights = ArrayRecord([np.zeros(100, dtype=np.float32)])
    sent = RecordDict({"arrays": weights, "config": ConfigRecord({"lr": 0.1, "name": ""})})
    inner = memory_grid({node: lambda m: RecordDict({"arrays": weights}) for node in (1, 2, 3)})
    grid = plain_grid(inner, deadline=5)
    grid.send_and_receive([Message(sent, node, "train") for node in (1, 2, 3)])
    array_bytes = weights.count_bytes()
    assert array_bytes >= 400
    config_bytes = len("lr") + 8 + len("name")
    assert grid.ledger.by_phase() == {
        "train": {DOWN: 3 * (array_bytes + config_bytes), UP: 3 * array_bytes}
    }
    assert grid.ledger.server_bytes == 3 * (2 * array_bytes + config_bytes)


def test_ledger_tells_arrays_and_parcels_from_the_control_messages_around_them(memory_grid):
    weights = ArrayRecord([np.zeros(100, dtype=np.float32)])
    config = ConfigRecord({"lr": 0.1, "key": b"\x01" * 32})
    delivery = ConfigRecord({"payload": bytes(1000), "peer-key": bytes(32)})
    sent = RecordDict({"arrays": weights, "config": config, "delivery.1": delivery})
    receipt = RecordDict({"parcel": ConfigRecord({"link": "direct", "num-bytes": 1000})})
    grid = plain_grid(memory_grid({1: lambda message: receipt}), deadline=5)
    grid.send_and_receive([Message(sent, 1, "train.aggregate_sector")])
    payloads = grid.ledger.payloads_by_phase()["train.aggregate_sector"]
    assert payloads == {DOWN: weights.count_bytes() + 1000, UP: 0}


def test_ledger_books_a_members_parcel_on_the_link_to_its_head_too(memory_grid):
    parcel = RecordDict({"parcel": ConfigRecord({"payload": bytes(1000)})})
    grid = plain_grid(memory_grid({1: lambda message: parcel}), deadline=5)
    grid.send_and_receive(messages_to([1], "train.distill", size=20))
    assert grid.ledger.by_phase()["train.distill"][RELAYED] == len("payload") + 1000
    assert grid.ledger.link_bytes == len("payload") + 1000


@pytest.mark.parametrize(("told", "booked"), [(1000, 1000), (0, 0), (-1, 0), (-(2**62), 0)])
def test_a_receipt_of_less_than_nothing_lowers_no_book(memory_grid, told, booked):
    receipts = iter([5000, told])
    grid = plain_grid(
        memory_grid(
            {
                1: lambda message: RecordDict(
                    {"parcel": ConfigRecord({"link": "direct", "num-bytes": next(receipts)})}
                )
            }
        ),
        deadline=5,
    )
    for _ in range(2):
        grid.send_and_receive(messages_to([1], "train.distill"))
    assert grid.ledger.by_phase()["train.distill"][DIRECT] == 5000 + booked
    assert grid.ledger.link_bytes == 5000 + booked
