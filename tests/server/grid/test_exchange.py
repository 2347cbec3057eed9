"""A Flower for which there is no folder: replies come by Flower's own grid, one by one."""

import logging
import threading
import time
from contextlib import suppress
from importlib.metadata import version

import grpc
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectUnavailableError,
    pull_and_inflate_object_from_tree,
    pull_objects,
)

from flwr_distill.flower import lines
from flwr_distill.flower.line_1_32.server import exchange as line_exchange
from flwr_distill.server.grid import exchange as exchange_module
from flwr_distill.server.grid.exchange import Exchange, exchange_over
from flwr_distill.server.grid.inbox import PULLS, Most, OneByOneInbox
from tests.grids import answering, messages_to, plain_grid, silent

END = 2.0**40
PULLERS = (pull_objects, pull_and_inflate_object_from_tree)


@pytest.fixture(autouse=True)
def flowers_own_waits(monkeypatch):
    """What an inbox changes of Flower's waits ends with the test."""
    for pull in PULLERS:
        monkeypatch.setattr(pull, "__kwdefaults__", dict(pull.__kwdefaults__))


def install_flower(monkeypatch, number):
    """Report another version of Flower."""
    for module in (lines, exchange_module):
        monkeypatch.setattr(module, "version", lambda name: number)


def inbox_of(grid, count):
    messages = messages_to(range(1, count + 1))
    sent = dict(zip(grid.push_messages(messages), messages, strict=True))
    return OneByOneInbox(grid, sent, lambda message: Most(10**6, 100))


@pytest.mark.parametrize("number", ["1.33.0", "1.41.0", "1.43.0.dev20261026"])
def test_another_flower_goes_its_own_way_and_the_log_says_so_once(
    number, memory_grid, monkeypatch, flower_log
):
    install_flower(monkeypatch, number)
    monkeypatch.setattr(memory_grid, "__module__", "flwr.superlink.grid")
    with flower_log.at_level(logging.INFO):
        grid = plain_grid(
            memory_grid({1: answering(num_examples=5), 2: answering(num_examples=6)}), deadline=10
        )
        for _ in range(2):
            replies = grid.send_and_receive(messages_to([1, 2]))
            assert [r.content["metrics"]["num-examples"] for r in replies] == [5, 6]
    said = [r.getMessage() for r in flower_log.records if "Flower's own way" in r.getMessage()]
    assert len(said) == 1
    assert number in said[0]


@pytest.mark.parametrize("number", [version("flwr"), "1.41.0"])
def test_a_simulation_goes_no_slower_way(number, memory_grid, monkeypatch, caplog):
    install_flower(monkeypatch, number)
    assert type(exchange_over(memory_grid({}))) is Exchange
    assert not caplog.messages


def test_the_flower_of_the_lock_has_a_folder_and_a_simulation_needs_none(memory_grid, superlink):
    assert version("flwr").startswith("1.32.")
    assert type(exchange_over(memory_grid({}))) is Exchange
    assert type(exchange_over(superlink().grid)).__name__ == "SuperLinkExchange"


def test_a_reply_that_cannot_be_read_takes_no_other_with_it(superlink, monkeypatch):
    install_flower(monkeypatch, "1.41.0")
    link = superlink(*(answering(num_examples=n) for n in (1, 2, 3)))
    pull = link.grid.pull_messages

    def fails_for_the_second(message_ids):
        replies = list(pull(message_ids))
        if any(reply.metadata.src_node_id == link.ids[1] for reply in replies):
            raise ValueError("no object is of this kind")
        return replies

    monkeypatch.setattr(link.grid, "pull_messages", fails_for_the_second)
    replies = plain_grid(link.grid, deadline=10).send_and_receive(messages_to(link.ids))
    by_node = {reply.metadata.src_node_id: reply for reply in replies}
    assert set(by_node) == set(link.ids)
    assert "cannot be read: no object is of this kind" in by_node[link.ids[1]].error.reason
    assert [by_node[node].content["metrics"]["num-examples"] for node in link.ids[::2]] == [1, 3]


def test_a_superlink_that_is_away_is_no_fault_of_a_node(memory_grid, monkeypatch):
    grid = memory_grid({1: answering(num_examples=1)})
    inbox = inbox_of(grid, 1)

    class Away(grpc.RpcError):
        __module__ = "grpc._channel"

    def away(message_ids):
        raise Away

    monkeypatch.setattr(grid, "pull_messages", away)
    with pytest.raises(Away):
        list(inbox.fetch(END))
    assert len(inbox.waiting) == 1


def test_many_nodes_are_asked_for_in_turn_and_a_few_at_a_time(memory_grid, monkeypatch):
    count = 2 * PULLS + 10
    grid = memory_grid(dict.fromkeys(range(1, count + 1), silent))
    inbox, asked = inbox_of(grid, count), []
    monkeypatch.setattr(grid, "pull_messages", lambda ids: asked.extend(ids) or [])
    for fetch in range(1, 4):
        assert list(inbox.fetch(END)) == []
        assert len(asked) == fetch * PULLS
    assert set(asked) == inbox.waiting
    assert list(inbox.fetch(time.monotonic() - 1)) == []
    assert len(asked) == 3 * PULLS


def test_what_a_node_has_announced_and_not_sent_holds_up_no_other_node(memory_grid, monkeypatch):
    grid = memory_grid(dict.fromkeys((1, 2, 3), answering(num_examples=1)))
    inbox, arrived = inbox_of(grid, 3), threading.Event()
    first, pull = min(inbox.waiting), grid.pull_messages

    def pull_when_it_is_there(ids):
        if first in ids:
            arrived.wait(30)
        return pull(ids)

    monkeypatch.setattr(grid, "pull_messages", pull_when_it_is_there)
    end = time.monotonic() + 30
    assert len(list(inbox.fetch(end))) == 2
    assert inbox.waiting == {first}
    assert inbox.coming
    assert list(inbox.fetch(end)) == []
    arrived.set()
    while inbox.waiting and time.monotonic() < end:
        list(inbox.fetch(end))
    assert not inbox.waiting
    inbox.close()


def test_objects_that_a_node_never_sends_are_given_up_at_the_end_of_the_phase(memory_grid):
    inbox = inbox_of(memory_grid({1: silent}), 1)
    list(inbox.fetch(time.monotonic() + 0.3))
    start = time.monotonic()
    with suppress(Exception):  # its name is another with each Flower
        pull_objects(["a"], never_there)
    assert time.monotonic() - start < 5  # Flower's own: two hours


def never_there(object_id):
    raise ObjectUnavailableError(object_id)


@pytest.mark.parametrize(("large", "times"), [(100, 1), (10**6, 0)])
def test_freed_memory_goes_back_once_a_large_model_is_pushed(superlink, monkeypatch, large, times):
    trimmed = []
    monkeypatch.setattr(line_exchange, "LARGE", large)
    monkeypatch.setattr(line_exchange, "trim_heap", lambda: trimmed.append(True))
    link = superlink(answering())
    (message,) = messages_to(link.ids)
    message.content["arrays"] = ArrayRecord({"w": Array(np.zeros(100))})
    exchange_over(link.grid).push([message])
    assert len(trimmed) == times
