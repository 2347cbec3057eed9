"""The log shows the progress of a long phase."""

import logging

import pytest

from flwr_distill.server.grid import progress
from flwr_distill.server.grid.progress import Progress
from tests.grids import answering, messages_to, plain_grid, silent


class Clock:
    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def said(caplog):
    return [record.getMessage() for record in caplog.records]


def test_it_says_whose_replies_are_missing_and_the_time_left_at_the_others_pace(clock, caplog):
    caplog.set_level(logging.INFO)
    phase = Progress("members distil their data", 10, {n: f"node-{n}" for n in range(10)})
    for seconds, replied in ((1, 0), (5, 0), (6, 1), (10, 2), (12, 10)):
        clock.now = 100 + seconds
        phase.show(range(replied, 10))
    assert said(caplog) == [
        "members distil their data: 0 of 10 nodes, "
        "waiting for node-0, node-1, node-2, node-3, node-4 and 5 others, 5 s so far",
        "members distil their data: 2 of 10 nodes, "
        "waiting for node-2, node-3, node-4, node-5, node-6 and 3 others, about 40 s left",
    ]


def test_in_a_phase_of_an_hour_it_does_not_fill_the_log(clock, caplog):
    caplog.set_level(logging.INFO)
    phase = Progress("nodes train", 1, {7: "ward-7"})
    for seconds in range(3600):
        clock.now = 100 + seconds
        phase.show([7])
    assert len(caplog.records) < 80
    assert said(caplog)[0] == "nodes train: 0 of 1 node, waiting for ward-7, 4 s so far"
    assert "another run" not in said(caplog)[0]
    assert sum("another run" in line for line in said(caplog)) == 1


def test_the_grid_says_it_with_names_that_come_later(memory_grid, caplog, monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.05)
    names = {}
    inner = memory_grid({1: answering(x=1), 2: silent})
    grid = plain_grid(inner, deadline=0.5, names=names)
    names[2] = "ward-2"
    grid.send_and_receive(messages_to([1, 2]))
    waiting = "nodes train: 1 of 2 nodes, waiting for ward-2, about 0 s left"
    assert any(waiting in line for line in said(caplog))


def test_nodes_without_a_name_are_counted_and_not_listed_by_their_ids(clock, caplog):
    caplog.set_level(logging.INFO)
    ids = [2**63 + n for n in range(3)]
    phase = Progress("nodes say who they are", 3, {ids[0]: "ward-1"})
    for seconds, waiting in ((5, ids), (10, ids[1:])):
        clock.now = 100 + seconds
        phase.show(waiting)
    first, second = said(caplog)
    assert "ward-1 and 2 nodes" in first
    assert "for 2 nodes" in second
    assert not any(str(node) in caplog.text for node in ids)
