"""Strategies wait for nodes, but not for ever."""

import time

import pytest

from strategies.common import waiting
from strategies.common.waiting import connected_nodes


def test_it_waits_for_the_last_node_and_returns_all(memory_grid, monkeypatch):
    grid, slept = memory_grid({1: None}), []

    def sleep(seconds):
        slept.append(seconds)
        grid.nodes = {**grid.nodes, len(grid.nodes) + 1: None}

    monkeypatch.setattr(waiting.time, "sleep", sleep)
    assert connected_nodes(grid, 3, 60.0) == [1, 2, 3]
    assert len(slept) == 2
    assert connected_nodes(grid, 1, 60.0) == [1, 2, 3]


def test_it_ends_with_an_error_that_names_the_setting(memory_grid, monkeypatch):
    monkeypatch.setattr(waiting, "LOOK_EVERY", 0.05)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"1 node of 2 connected within 0 s .*min-nodes"):
        connected_nodes(memory_grid({1: None}), 2, 0.2)
    assert 0.2 < time.monotonic() - begin < 5
