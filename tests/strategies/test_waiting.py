"""Strategies wait for nodes, but not for ever."""

import logging
import time

import pytest

from flwr_distill.strategies.common import waiting
from flwr_distill.strategies.common.waiting import TooFewNodesError, connected_nodes
from tests.errors import at


def test_it_waits_for_the_last_node_says_so_and_returns_all(memory_grid, monkeypatch, caplog):
    grid, slept = memory_grid({1: None}), []

    def sleep(seconds):
        slept.append(seconds)
        grid.nodes = {**grid.nodes, len(grid.nodes) + 1: None}

    monkeypatch.setattr(waiting.time, "sleep", sleep)
    caplog.set_level(logging.INFO)
    assert connected_nodes(grid, 3, 60.0) == [1, 2, 3]
    assert len(slept) == 2
    assert "1 of 3 are connected, 60 s left" in caplog.text
    assert connected_nodes(grid, 1, 60.0) == [1, 2, 3]


def test_it_ends_with_an_error_that_names_the_setting(memory_grid, monkeypatch):
    monkeypatch.setattr(waiting, "POLL", 0.05)
    begin = time.monotonic()
    with pytest.raises(TooFewNodesError, check=at("min-nodes", value=2)):
        connected_nodes(memory_grid({1: None}), 2, 0.2)
    assert 0.2 < time.monotonic() - begin < 5
