"""Messages go to a SuperLink in batches: equal objects go once, and what nodes see is complete."""

import tracemalloc

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.proto.message_pb2 import PushObjectResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, iterate_object_tree

from flwr_distill.flower.line_1_32.calls import Batches
from flwr_distill.flower.line_1_32.server import batches
from flwr_distill.flower.line_1_32.server.batches import BATCH
from flwr_distill.server.grid.exchange import exchange_over
from tests.grids import plain_grid, silent

NODES = 2 * BATCH + 5
MODEL = ArrayRecord([np.arange(1000.0), np.arange(10.0)])


def models_to(nodes):
    """A message for each, with records of its own."""
    return [Message(RecordDict({"arrays": MODEL}), node, "train") for node in nodes]


def places_to(nodes):
    """Messages that differ."""
    return [
        Message(
            RecordDict({"arrays": MODEL, "config": ConfigRecord({"place": place})}), node, "train"
        )
        for place, node in enumerate(nodes)
    ]


@pytest.mark.parametrize("count", [1, BATCH, NODES])
def test_what_equal_messages_hold_is_sent_once(superlink, count):
    link = superlink(*[silent] * count)
    messages = models_to(link.ids)
    ids = exchange_over(link.grid).push(messages)
    assert ids == [message.object_id for message in messages]
    shared = len(get_all_nested_objects(messages[0])) - 1
    assert link.calls.count("PushObject") == shared + count


def test_a_large_model_is_encoded_as_it_is_sent_and_never_as_a_whole(superlink, monkeypatch):
    link = superlink(silent, together=True)
    monkeypatch.setattr(batches, "SMALL", 0)
    monkeypatch.setattr(batches, "AT_A_TIME", 2)
    model = ArrayRecord([np.full(2_000_000, value, np.float32) for value in range(10)])
    message = Message(RecordDict({"arrays": model}), link.ids[0], "train")
    message.object_id  # noqa: B018 (its hash is computed from all of it)
    pushed = []

    def push_object(request):
        pushed.append(request.object_id)
        return PushObjectResponse(stored=True)

    link.grid._stub.PushObject = push_object
    tracemalloc.start()
    try:
        exchange_over(link.grid).push([message])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(pushed) == len(get_all_nested_objects(message)) > 20
    assert peak < 40e6


def test_a_node_that_sees_a_message_finds_the_model_in_it(superlink):
    link, missing = superlink(*[silent] * (2 * BATCH)), []
    push_messages = link.grid._stub.PushMessages

    def watched(request):
        response = push_messages(request)
        if link.calls.count("PushMessages") > 1:
            missing.append(len(response.objects_to_push) - len(request.messages_list))
        return response

    link.grid._stub.PushMessages = watched
    exchange_over(link.grid).push(models_to(link.ids))
    assert missing
    assert set(missing) == {0}  # but the messages' own headers, which are a few bytes


def test_messages_that_differ_reach_each_node_as_they_are(superlink):
    got = {}

    def node(place):
        def answer(message):
            got[place] = message.content["config"]["place"]

        return answer

    link = superlink(*map(node, range(BATCH + 3)))
    exchange_over(link.grid).push(places_to(link.ids))
    link.work()
    assert got == {place: place for place in range(BATCH + 3)}


def test_a_phase_costs_a_call_or_so_for_each_batch_and_each_look(superlink):
    def trained(seed):
        arrays = ArrayRecord([np.random.default_rng(seed).standard_normal(100) for _ in range(3)])
        metrics = MetricRecord({"num-examples": seed})
        return lambda message: RecordDict({"arrays": arrays, "metrics": metrics})

    link = superlink(*map(trained, range(NODES)), together=True)
    grid = plain_grid(link.grid, deadline=30.0)
    grid.nodes.order = {node: place for place, node in enumerate(link.ids)}
    replies = grid.send_and_receive(models_to(link.ids))
    assert [reply.content["metrics"]["num-examples"] for reply in replies] == list(range(NODES))
    assert set(link.calls) == {"PullMessages"}
    batches_of_messages, polls = 1 + 2 + 1, link.calls.count("PullMessages")
    assert len(link.grid._channel.calls) <= batches_of_messages + 2 * polls
    assert len(link.store) == 0


@pytest.mark.parametrize("small", [batches.SMALL, 8500, 0], ids=["all", "some", "none"])
def test_what_equal_messages_hold_is_sent_once_and_all_of_it_arrives(superlink, small, monkeypatch):
    """However much goes with the messages, and what follows."""
    monkeypatch.setattr(batches, "SMALL", small)
    link, put = superlink(*[silent] * NODES, together=True), []
    store = link.store.put
    monkeypatch.setattr(link.store, "put", lambda *each: put.append(each[0]) or store(*each))
    messages = models_to(link.ids)
    ids = exchange_over(link.grid).push(messages)
    assert ids == [message.object_id for message in messages]
    objects = {name for message in messages for name in get_all_nested_objects(message)}
    assert sorted(put) == sorted(objects)


def test_a_message_is_shown_with_all_that_is_in_it(superlink):
    link, missing = superlink(*[silent] * NODES, together=True), []
    shown = link.state.get_message_ins

    def complete(node_id, limit):
        messages = shown(node_id, limit)
        for message in messages:
            tree = link.store.get_object_tree(message.metadata.message_id)
            parts = [part.object_id for part in iterate_object_tree(tree)]
            missing.extend(part for part in parts if not link.store.get(part))
        return messages

    link.state.get_message_ins = complete
    exchange_over(link.grid).push(models_to(link.ids))
    link.work()
    assert not missing


def test_objects_that_the_superlink_has_lost_are_sent_again(superlink, monkeypatch):
    """As when the first nodes are done with them before the last messages go out."""
    got = []
    link = superlink(*[lambda message: got.append(message)] * NODES, together=True)
    make_all = Batches.make_all

    def receiving_the_first(self, *arguments, **named):
        answers = make_all(self, *arguments, **named)
        if not got:
            link.work()  # and lets go of all that is there
            assert len(link.store) == 0
        return answers

    monkeypatch.setattr(Batches, "make_all", receiving_the_first)
    ids = exchange_over(link.grid).push(models_to(link.ids))
    link.work()
    assert len(got) == len(ids) == NODES
    assert all(len(message.content["arrays"]) == 2 for message in got)


def test_messages_that_the_superlink_refuses_have_no_id(superlink):
    link = superlink(silent, silent, silent, together=True)
    link.state.delete_node("", link.ids[1])
    messages = places_to(link.ids)
    first, refused, last = exchange_over(link.grid).push(messages)
    assert (first, refused, last) == (messages[0].object_id, "", messages[2].object_id)
