"""Replies that come through a SuperLink: Flower's own, in this process."""

import time
import tracemalloc
from contextlib import suppress
from functools import partial

import grpc
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.inflatable import inflatable_utils
from flwr.superlink.grid import GrpcGrid

from flwr_distill.flower.line_1_32.server import inbox as inbox_module
from flwr_distill.flower.line_1_32.server.exchange import CALL_TIMEOUT
from flwr_distill.flower.line_1_32.server.inbox import PULLS
from flwr_distill.server.grid import transport
from flwr_distill.server.grid.exchange import Exchange, exchange_over
from flwr_distill.server.grid.inbox import Most, OneByOneInbox
from tests.grids import messages_to, plain_grid, silent

PARTS = 10
"""Objects of a reply: three arrays of a chunk each, two records, what holds them, the message."""


def model(seed=0):
    rng = np.random.default_rng(seed)
    return ArrayRecord([rng.standard_normal(1000) for _ in range(3)])


def trained(seed):
    return lambda message: RecordDict(
        {"arrays": model(seed), "metrics": MetricRecord({"num-examples": seed})}
    )


def train_messages(nodes):
    return messages_to(nodes, arrays=model(), config=ConfigRecord({"lr": 0.1}))


def inbox_of(link):
    messages = train_messages(link.ids)
    sent = dict(zip(link.grid.push_messages(messages), messages, strict=True))
    return exchange_over(link.grid).open_inbox(sent, lambda message: Most(10**6, 100))


def ask(link, deadline=5.0):
    grid = plain_grid(link.grid, deadline=deadline)
    grid.nodes.order = {node: place for place, node in enumerate(link.ids)}
    return grid, grid.send_and_receive(train_messages(link.ids))


@pytest.fixture(params=[False, True], ids=["alone", "together"])
def either(superlink, request):
    """A SuperLink that takes each call alone, as Flower's, or several together, as ours."""
    return partial(superlink, together=request.param)


def test_a_reply_that_is_too_large_is_not_taken_in_and_leaves_nothing(either, monkeypatch):
    monkeypatch.setattr(transport, "ROOM", 5000)
    monkeypatch.setattr(transport, "MODELS", 0)
    monkeypatch.setattr(inflatable_utils, "get_num_workers", lambda most: 1)  # one after the other
    link = either(trained(1), lambda message: Error(2, "as asked"))
    _, replies = ask(link)
    assert "more than 5,000 bytes" in replies[0].error.reason
    assert replies[1].error.reason == "as asked"
    assert len(link.store) == 0
    of_the_error = link.parts[link.ids[1]]
    assert link.calls.count("PullObject") < link.parts[link.ids[0]] + of_the_error


def test_a_reply_of_many_arrays_of_one_number_is_refused_before_any_is_pulled(
    superlink, monkeypatch
):
    """Each is two objects, and each object a call to the SuperLink."""
    monkeypatch.setattr(transport, "PARTS", 30)
    many = ArrayRecord([np.full(1, i, np.float32) for i in range(100)])
    link = superlink(lambda message: RecordDict({"arrays": many}), trained(2))
    _, replies = ask(link)
    assert "more than 50 parts" in replies[0].error.reason
    assert replies[1].has_content()
    assert link.calls.count("PullObject") == PARTS
    assert len(link.store) == 0


def test_a_reply_may_have_the_parts_of_what_it_answers_however_many_these_are(
    superlink, monkeypatch
):
    monkeypatch.setattr(transport, "PARTS", 0)
    monkeypatch.setattr(transport, "MODELS", 1)
    monkeypatch.setattr(inbox_module, "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", 10**9)
    link = superlink(trained(1))
    _, (reply,) = ask(link)
    assert reply.has_content()


@pytest.mark.parametrize(("large", "times"), [(100, 3), (10**6, 0)])
def test_freed_memory_goes_back_before_and_after_each_large_reply(
    superlink, monkeypatch, large, times
):
    trimmed = []
    monkeypatch.setattr(inbox_module, "LARGE", large)
    monkeypatch.setattr(inbox_module, "trim_heap", lambda: trimmed.append(True))
    link = superlink(trained(1), trained(2))
    _, replies = ask(link)
    assert all(reply.has_content() for reply in replies)
    assert len(trimmed) == times


def grown(times):
    """A model whose one chunk counts so many times: 80 kB become 800 MB."""
    content = RecordDict({"arrays": ArrayRecord({"w": Array(np.ones(10_000))})})
    array = content["arrays"]["w"]
    array.__dict__["_chunks"] = array.slice_array() * times
    return lambda message: content


@pytest.mark.parametrize("flower", ["ours", "its own way"])
def test_a_chunk_that_is_named_again_and_again_does_not_fill_the_servers_memory(
    superlink, monkeypatch, flower
):
    if flower == "its own way":
        monkeypatch.setattr(transport, "exchange_over", lambda grid: Exchange(grid, OneByOneInbox))
    link = superlink(grown(10_000), trained(2))
    tracemalloc.start()
    try:
        _, replies = ask(link)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert replies[0].has_error()
    assert replies[1].has_content()
    assert peak < 2e7


def test_replies_come_as_they_were_sent_and_leave_nothing_in_the_superlink(either):
    link = either(trained(1), trained(2), lambda message: Error(2, "as asked"))
    grid, replies = ask(link)
    assert [reply.metadata.src_node_id for reply in replies] == link.ids
    for seed, reply in enumerate(replies[:2], start=1):
        assert reply.content["metrics"]["num-examples"] == seed
        for found, expected in zip(
            reply.content["arrays"].values(), model(seed).values(), strict=True
        ):
            np.testing.assert_array_equal(found.numpy(), expected.numpy())
    assert replies[2].error.reason == "as asked"
    assert link.parts[link.ids[0]] == PARTS
    assert len(link.store) == 0
    sent = sum(record.count_bytes() for record in trained(1)(None).values())
    assert grid.ledger.by_phase()["train"]["node->server"] == 2 * sent


@pytest.mark.parametrize("sent", [0, 1, PARTS // 2, PARTS - 1])
def test_a_reply_that_is_broken_off_holds_up_neither_the_others_nor_the_deadline(either, sent):
    link = either(trained(1), trained(2), trained(3))
    link.sends[link.ids[0]] = sent
    begin = time.monotonic()
    _, replies = ask(link, deadline=0.5)
    assert 0.5 <= time.monotonic() - begin < 2.5
    assert [reply.metadata.src_node_id for reply in replies] == link.ids[1:]
    assert len(link.store) == 0


def test_a_reply_whose_last_part_overtook_another_is_not_taken_for_whole(either):
    link = either(trained(1), trained(2))
    link.lost_parts = {0}
    _, replies = ask(link, deadline=0.5)
    assert replies == []
    assert len(link.store) == 0


def test_a_reply_that_comes_piece_by_piece_is_taken_once_it_is_whole(either):
    link = either(trained(1), trained(2))
    slow = link.ids[0]
    link.sends[slow] = 0
    inbox = inbox_of(link)
    begin, end = time.monotonic(), time.monotonic() + 60
    assert len(list(inbox.fetch(end))) == 1
    for _ in range(PARTS):
        assert list(inbox.fetch(end)) == []
        link.push(slow, 1)
    (reply,) = inbox.fetch(end)
    assert reply.content["metrics"]["num-examples"] == 1
    assert not inbox.waiting
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("node", [None, silent], ids=["fetched nothing", "never replied"])
def test_a_node_that_the_superlink_takes_for_connected_ends_with_the_deadline(
    superlink, node, caplog
):
    """As for a minute after it died; and its message, with the model in it, is dropped."""
    link = superlink(trained(1), node)
    begin = time.monotonic()
    _, replies = ask(link, deadline=0.5)
    assert 0.5 <= time.monotonic() - begin < 2.0
    assert [reply.metadata.src_node_id for reply in replies] == link.ids[:1]
    assert f"within 0 s: {link.ids[1]}" in caplog.text
    assert len(link.store) == 0


@pytest.mark.parametrize(("sent", "longest"), [(3, 0.05), (0, 0.05), (None, 0.5)])
def test_a_reply_that_is_on_its_way_is_looked_for_often(superlink, monkeypatch, sent, longest):
    link = superlink(trained(1) if sent is not None else silent)
    link.sends[link.ids[0]] = sent
    waits, sleep = [], time.sleep

    def noting(seconds):
        waits.append(seconds)
        sleep(0.01)

    monkeypatch.setattr(time, "sleep", noting)
    ask(link, deadline=0.8)
    assert max(waits) == longest


def test_a_lost_node_is_an_error_at_once_and_its_message_is_dropped(either):
    link = either(trained(1), None)
    lost = link.ids[1]
    link.state.deactivate_node(lost)
    begin = time.monotonic()
    _, replies = ask(link, deadline=60.0)
    assert time.monotonic() - begin < 5
    assert [reply.has_error() for reply in replies] == [False, True]
    assert replies[1].metadata.src_node_id == lost
    assert len(link.store) == 0


def test_a_node_that_is_lost_while_it_sends_is_an_error_as_soon_as_that_is_known(
    either, monkeypatch
):
    monkeypatch.setattr(inbox_module, "CHECK_SENDERS", 0.2)
    link = either(trained(1), trained(2))
    slow, lost = link.ids
    link.sends = {slow: 3, lost: 3}
    inbox, end = inbox_of(link), time.monotonic() + 60
    assert list(inbox.fetch(end)) == []
    link.state.deactivate_node(lost)
    time.sleep(0.3)
    (reply,) = inbox.fetch(end)
    assert (reply.metadata.src_node_id, reply.error.code) == (lost, ErrorCode.NODE_UNAVAILABLE)
    link.push(slow, PARTS - 3)
    (reply,) = inbox.fetch(end)
    assert (reply.metadata.src_node_id, reply.has_content()) == (slow, True)
    assert len(link.store) == 0


def test_a_look_for_replies_ends_with_the_phase_and_the_next_takes_up_what_is_left(either):
    link = either(trained(1), trained(2))
    inbox = inbox_of(link)
    assert list(inbox.fetch(time.monotonic())) == []
    assert inbox.coming
    assert len(list(inbox.fetch(time.monotonic() + 60))) == 2
    assert not inbox.coming


def test_who_is_connected_is_asked_once_in_a_while_and_not_at_every_look(superlink):
    link = superlink(trained(1), trained(2))
    link.sends = dict.fromkeys(link.ids, 3)
    inbox = inbox_of(link)
    for _ in range(5):
        assert list(inbox.fetch(time.monotonic() + 60)) == []
    assert "GetNodes" not in link.calls


def test_of_a_reply_that_is_on_its_way_the_part_that_is_sent_last_is_looked_for_first(
    superlink, monkeypatch
):
    monkeypatch.setattr(inflatable_utils, "get_num_workers", lambda most: 1)  # one after the other
    link = superlink(trained(1))
    link.sends[link.ids[0]] = PARTS - 1
    inbox = inbox_of(link)
    assert list(inbox.fetch(time.monotonic() + 60)) == []
    link.calls.clear()
    assert list(inbox.fetch(time.monotonic() + 60)) == []
    assert link.calls.count("PullObject") == 1


def test_what_a_reply_answers_is_the_superlinks_word_and_not_the_senders(either):
    link = either(trained(1), trained(2))
    link.forge = lambda metadata: metadata.__dict__.update(
        _src_node_id=link.ids[0], _reply_to_message_id="another", _message_type="evaluate"
    )
    _, replies = ask(link)
    for seed, (node, reply) in enumerate(zip(link.ids, replies, strict=True), start=1):
        assert reply.metadata.src_node_id == node
        assert reply.metadata.message_type == "train"
        assert reply.content["metrics"]["num-examples"] == seed


def shape_of_words():
    array = Array(np.zeros(3))
    array.shape = ("three",)
    record = ArrayRecord()
    record["w"] = array
    return RecordDict({"arrays": record})


@pytest.mark.parametrize("content", [ArrayRecord(), shape_of_words()], ids=["records", "shape"])
def test_a_reply_that_cannot_be_read_is_an_error_of_its_node_alone(either, content):
    link = either(lambda message: content, trained(2))
    _, replies = ask(link)
    assert [reply.has_error() for reply in replies] == [True, False]
    assert "Its reply cannot be read: Invalid arguments" in replies[0].error.reason
    assert len(link.store) == 0


def test_a_look_for_replies_costs_the_same_for_any_number_of_nodes(superlink):
    count = 2 * PULLS
    link = superlink(*[trained(1)] * count)
    link.sends = dict.fromkeys(link.ids, 0)
    inbox = inbox_of(link)
    end = time.monotonic() + 60
    link.work()
    for _ in range(2):
        link.calls.clear()
        assert list(inbox.fetch(end)) == []
        assert link.calls.count("PullMessages") <= 1
        assert PULLS <= link.calls.count("PullObject") <= 2 * PULLS
    for node in link.ids:
        link.push(node, PARTS)
    found = [list(inbox.fetch(end)), list(inbox.fetch(end))]
    assert [len(each) for each in found] == [PULLS, PULLS]
    assert not inbox.waiting


class Away(grpc.RpcError):
    def code(self):
        return grpc.StatusCode.UNAVAILABLE

    def details(self):
        return "connection refused"


def test_a_superlink_that_is_back_is_noticed_within_two_seconds():
    grid, waits = GrpcGrid(token="none"), []
    plain_grid(grid, deadline=10)

    def wait(seconds):
        waits.append(seconds)
        if len(waits) == 200:
            raise TimeoutError

    def call(timeout):
        assert timeout == CALL_TIMEOUT
        raise Away

    grid._retry_invoker.wait_function = wait
    with suppress(TimeoutError):
        grid._retry_invoker.invoke(call)
    assert len(waits) == 200
    assert 1 < max(waits) <= 2
