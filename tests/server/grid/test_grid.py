"""The grid of a run: order, deadlines, quorum, nodes; the bytes are in test_ledger."""

import random
import time

import pytest
from flwr.serverapp.strategy.strategy_utils import sample_nodes

from flwr_distill.protocol.registry import find_method, phases_of
from flwr_distill.server.grid.grid import RunGrid
from flwr_distill.server.grid.pipeline import QuorumError
from flwr_distill.server.grid.transport import Transport
from flwr_distill.server.record.journal import Journal
from flwr_distill.strategies.common.waiting import TooFewNodesError
from tests.errors import at
from tests.grids import answering, broken, messages_to, plain_grid, silent

ANSWER = answering(x=1)


def train(grid, nodes, message_type="train", **settings):
    return grid.send_and_receive(messages_to(nodes, message_type), **settings)


def senders(replies):
    return [reply.metadata.src_node_id for reply in replies]


def test_replies_come_in_the_order_of_the_nodes_whoever_is_faster(memory_grid):
    inner = memory_grid(dict.fromkeys((3, 1, 2), ANSWER))
    inner.reverse = True
    grid = plain_grid(inner, deadline=5)
    grid.nodes.order = {2: 0, 3: 1, 1: 2}
    assert senders(train(grid, [1, 2, 3])) == [2, 3, 1]


@pytest.mark.parametrize(("deadline", "timeout"), [(60, 0.3), (0.3, 60), (0.3, None)])
def test_of_a_phases_timeout_and_the_grids_deadline_the_shorter_counts(
    memory_grid, deadline, timeout
):
    inner = memory_grid({1: ANSWER, 2: silent})
    begin = time.monotonic()
    replies = train(plain_grid(inner, deadline=deadline), [1, 2], timeout=timeout)
    assert 0.3 <= time.monotonic() - begin < 2
    assert senders(replies) == [1]
    assert [message.metadata.ttl for message in inner.pushed] == [0.3, 0.3]


@pytest.mark.parametrize(("ttl", "expected"), [(60, 7), (3, 3)])
def test_messages_expire_with_the_deadline_so_that_no_node_works_for_a_past_phase(
    memory_grid, ttl, expected
):
    inner = memory_grid({1: ANSWER})
    (message,) = messages_to([1])
    message.metadata.ttl = ttl
    plain_grid(inner, deadline=7).send_and_receive([message])
    assert inner.pushed[0].metadata.ttl == expected


def test_replies_are_looked_for_often_at_first_and_after_each_and_seldom_in_between(
    memory_grid, monkeypatch
):
    waits = []

    class Slow(memory_grid):
        def pull_messages(self, message_ids):
            return super().pull_messages(message_ids) if len(waits) in (40, 80) else []

    monkeypatch.setattr(time, "sleep", waits.append)
    assert len(train(plain_grid(Slow({1: ANSWER, 2: ANSWER}), deadline=60), [1, 2])) == 2
    first, second = waits[:40], waits[40:]
    assert len(second) == 40
    for waited in (first, second):
        assert waited == sorted(waited)
        assert waited[0] <= 0.05
        assert waited[-1] == 0.5


def test_an_error_reply_is_passed_on_to_the_strategy(memory_grid):
    replies = train(plain_grid(memory_grid({1: broken, 2: ANSWER}), deadline=5), [1, 2])
    assert [reply.has_error() for reply in replies] == [True, False]


def test_an_error_that_the_superlink_sends_for_a_lost_node_bears_that_nodes_id(memory_grid, caplog):
    class ForLostNodes(memory_grid):
        def pull_messages(self, message_ids):
            for reply in super().pull_messages(message_ids):
                reply.metadata.__dict__["_src_node_id"] = 1  # the SuperLink's own
                yield reply

    (reply,) = train(plain_grid(ForLostNodes({7: broken}), deadline=5), [7])
    assert reply.metadata.src_node_id == 7
    assert "no data" in reply.error.reason
    assert "did not reply" not in caplog.text


def test_a_message_that_the_superlink_does_not_take_is_not_waited_for(memory_grid, caplog):
    class Refusing(memory_grid):
        def push_messages(self, messages):
            taken = super().push_messages(messages)
            nodes = (message.metadata.dst_node_id for message in messages)
            return ["" if node == 2 else i for i, node in zip(taken, nodes, strict=True)]

    begin = time.monotonic()
    replies = train(plain_grid(Refusing({1: ANSWER, 2: silent}), deadline=20), [1, 2])
    assert time.monotonic() - begin < 10
    assert senders(replies) == [1]
    assert "continues without 1 of 2 nodes" in caplog.text


def test_no_message_means_no_wait(memory_grid):
    assert plain_grid(memory_grid({}), deadline=5).send_and_receive([]) == []


def test_nodes_come_in_the_rosters_order_and_strangers_after_them(memory_grid):
    grid = plain_grid(memory_grid(dict.fromkeys((9, 4, 7, 2), ANSWER)), deadline=5)
    grid.nodes.order = {7: 0, 2: 1}
    assert grid.get_node_ids() == [7, 2, 4, 9]


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
    nodes = {node: ANSWER if node < replied else broken for node in range(asked)}
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
    fedlgd = phases_of(find_method("fedlgd"))
    inner = memory_grid({1: ANSWER, 2: silent})
    grid = plain_grid(inner, deadline=0.2, quorum=1.0, phases=fedlgd)
    with pytest.raises(QuorumError, match=r"train\.virtual: 1 of 2 nodes .* within 0 s"):
        train(grid, [1, 2], "train.virtual")


@pytest.mark.parametrize("phase", ["evaluate", "query.describe", "train.distill"])
def test_phases_in_which_single_nodes_work_for_others_need_no_quorum(memory_grid, phase):
    assert train(plain_grid(memory_grid({1: silent}), deadline=0.1, quorum=1.0), [1], phase) == []


def test_replies_that_are_screened_off_do_not_count_for_the_quorum(memory_grid):
    class Screening:
        def check(self, message, reply):
            return ""

        def compare(self, phase, messages, replies, connected):
            return {1: "hostile"}

    inner = memory_grid({1: ANSWER, 2: ANSWER})
    with pytest.raises(QuorumError, match="1 of 2"):
        train(RunGrid(Transport(inner, deadline=5), Screening(), quorum=1.0), [1, 2])


def test_sampling_from_no_nodes_at_all_ends_with_a_named_error(memory_grid):
    inner = memory_grid({1: ANSWER})
    grid = plain_grid(inner, deadline=0.5)
    train(grid, [1])
    inner.nodes = {}
    begin = time.monotonic()
    with pytest.raises(TooFewNodesError, match="no node"):
        sample_nodes(grid, min_available_nodes=1, sample_size=1)
    assert 0.5 < time.monotonic() - begin < 3


def test_a_federation_is_alone_only_since_its_last_node_left(memory_grid):
    inner = memory_grid({})
    grid = plain_grid(inner, deadline=0.4)
    assert grid.get_node_ids() == []
    inner.nodes = {1: ANSWER}
    time.sleep(0.5)
    assert grid.get_node_ids() == [1]
    inner.nodes = {}
    time.sleep(0.6)
    assert grid.get_node_ids() == []


def test_sampling_does_not_wait_for_a_node_that_left_since_it_was_counted(memory_grid):
    inner = memory_grid(dict.fromkeys((1, 2, 3), ANSWER))
    grid = plain_grid(inner, deadline=60)
    counted = len(grid.get_node_ids())
    del inner.nodes[3]
    begin = time.monotonic()
    sampled, _ = sample_nodes(grid, min_available_nodes=1, sample_size=counted)
    assert sorted(sampled) == [1, 2, 3]
    assert time.monotonic() - begin < 0.5


def test_each_phase_looks_for_nodes_anew(memory_grid):
    inner = memory_grid({1: ANSWER})
    grid = plain_grid(inner, deadline=5)
    assert grid.get_node_ids() == [1]
    inner.nodes[2] = ANSWER
    train(grid, [1])
    assert grid.get_node_ids() == [1, 2]


def test_nodes_are_sampled_alike_in_each_phase_whatever_else_drew_in_between(memory_grid):
    def sampled(noise):
        inner = memory_grid(dict.fromkeys(range(50), ANSWER))
        grid, drawn = plain_grid(inner, deadline=5, seed=3), []
        for _ in range(3):
            drawn.append(random.sample(grid.get_node_ids(), 10))
            for _ in range(noise):
                random.random()  # as Flower's retries do
            train(grid, drawn[-1])
        return drawn

    assert sampled(noise=0) == sampled(noise=7)
    assert sampled(noise=0)[0] != sampled(noise=0)[1]
