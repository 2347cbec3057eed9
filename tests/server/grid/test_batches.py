"""Messages go to a SuperLink in batches: what nodes see is there, and equal objects go once."""

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from flwr_distill.flower.line_1_32.server.batches import BATCH
from flwr_distill.server.grid.exchange import exchange_over

MODEL = ArrayRecord([np.arange(1000.0), np.arange(10.0)])


def messages_to(nodes, **records):
    return [Message(RecordDict({"arrays": MODEL, **records}), node, "train") for node in nodes]


def silent(message):
    return None


@pytest.mark.parametrize("count", [1, BATCH, 2 * BATCH + 5])
def test_what_equal_messages_hold_is_sent_once(superlink, count):
    link = superlink(*[silent] * count)
    messages = messages_to(link.ids)
    ids = exchange_over(link.grid).push(messages)
    assert ids == [message.object_id for message in messages]
    shared = len(get_all_nested_objects(messages[0])) - 1
    assert link.calls.count("PushObject") == shared + count


def test_a_node_that_sees_a_message_finds_the_model_in_it(superlink):
    link, missing = superlink(*[silent] * (2 * BATCH)), []
    push_messages = link.grid._stub.PushMessages

    def watched(request):
        response = push_messages(request)
        if link.calls.count("PushMessages") > 1:
            missing.append(len(response.objects_to_push) - len(request.messages_list))
        return response

    link.grid._stub.PushMessages = watched
    exchange_over(link.grid).push(messages_to(link.ids))
    assert missing
    assert set(missing) == {0}  # but the messages' own headers, which are a few bytes


def test_messages_that_differ_reach_each_node_as_they_are(superlink):
    got = {}

    def node(place):
        def answer(message):
            got[place] = message.content["config"]["place"]

        return answer

    link = superlink(*map(node, range(BATCH + 3)))
    messages = [
        messages_to([each], config=ConfigRecord({"place": place}))[0]
        for place, each in enumerate(link.ids)
    ]
    exchange_over(link.grid).push(messages)
    link.work()
    assert got == {place: place for place in range(BATCH + 3)}
