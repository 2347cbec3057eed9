"""The looks of many nodes are spaced, those of a few are not."""

import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from protocol.messages import LOOK_EVERY, PACE
from server.grid.looks import space_looks
from server.grid.metered import MeteredGrid


def messages_to(nodes):
    return [Message(RecordDict({"config": ConfigRecord()}), node, "train") for node in nodes]


@pytest.mark.parametrize(("count", "apart"), [(2, None), (5, None), (20, 0.2), (300, 3.0)])
def test_nodes_of_a_phase_look_a_hundred_times_a_second_in_all(superlink, count, apart):
    messages = messages_to(range(1, count + 1))
    space_looks(superlink().grid, messages)
    told = {message.content.get(PACE, {}).get(LOOK_EVERY) for message in messages}
    assert told == {apart}


def test_nodes_learn_it_from_the_message_and_its_bytes_are_counted(superlink):
    seen = []

    def answer(message):
        seen.append(message.content[PACE][LOOK_EVERY])
        return RecordDict()

    link = superlink(*[answer] * 10)
    grid = MeteredGrid(link.grid, deadline=10)
    grid.send_and_receive(messages_to(link.ids))
    assert seen == [0.1] * 10
    assert grid.ledger.server_bytes == 10 * (len(LOOK_EVERY) + 8)


def test_a_simulation_starts_its_nodes_itself(memory_grid):
    messages = messages_to(range(10))
    space_looks(memory_grid({}), messages)
    assert all(PACE not in message.content for message in messages)
