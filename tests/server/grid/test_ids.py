"""Nobody can guess the id of another node's message."""

import copy
import math
from itertools import pairwise

from flwr.app import ConfigRecord, Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from flwr_distill.server.grid.transport import RANDOM_BYTES, make_id_random
from tests.grids import plain_grid

BITS = 128
DRAWS = 2000
MICROSECONDS = 300
"""As far apart as messages of a phase are made, and more."""


def nonce(message):
    return message.metadata.group_id.rpartition("#")[2]


def message_to(node, group=""):
    content = RecordDict({"config": ConfigRecord({"lr": 0.1})})
    return Message(content, node, "train", group_id=group)


@given(st.text(max_size=40))
def test_an_id_has_random_bits_of_its_own_each_time_and_the_group_stays(group):
    message, ids = message_to(1, group), set()
    for _ in range(3):
        make_id_random(message)
        ids.add(message.object_id)
        assert message.metadata.group_id.startswith(group)
        assert len(message.metadata.group_id) == len(group) + 1 + BITS // 4
    assert len(ids) == 3


def test_each_of_128_bits_is_drawn_evenly_and_apart_from_the_others():
    draws = []
    for _ in range(DRAWS):
        make_id_random(message := message_to(1))
        draws.append(int(nonce(message), 16))
    assert RANDOM_BYTES * 8 == BITS
    assert len(set(draws)) == DRAWS
    bound = 5 * math.sqrt(DRAWS) / 2  # five deviations of a fair coin
    columns = [[draw >> bit & 1 for draw in draws] for bit in range(BITS)]
    assert all(abs(sum(column) - DRAWS / 2) < bound for column in columns)
    for one, other in pairwise(columns):
        same = sum(a == b for a, b in zip(one, other, strict=True))
        assert abs(same - DRAWS / 2) < bound


def guesses(own, node):
    """Ids that another node's message may have, by one's own message, nearest in time first."""
    for far in sorted(range(-MICROSECONDS, MICROSECONDS + 1), key=abs):
        guess = copy.deepcopy(own)
        guess.metadata.dst_node_id = node
        guess.metadata.created_at = round(own.metadata.created_at + far * 1e-6, 6)
        yield guess.object_id


def test_a_node_does_not_find_the_id_of_another_by_its_own_message(superlink):
    sent = []
    link = superlink(sent.append, sent.append)
    grid = plain_grid(link.grid, deadline=0.2)
    grid.send_and_receive([message_to(node) for node in link.ids])
    own, theirs = sent
    guessed = set(guesses(own, theirs.metadata.dst_node_id))
    assert theirs.metadata.message_id not in guessed


def test_no_message_of_any_strategy_goes_without(memory_grid):
    nodes = memory_grid({1: lambda message: RecordDict(), 2: lambda message: RecordDict()})
    grid = plain_grid(nodes, deadline=5)
    grid.send_and_receive([message_to(1), message_to(2)])
    grid.push_messages([message_to(1), message_to(2)])
    assert len({nonce(message) for message in nodes.pushed}) == 4
