"""A strategy that waits for nodes: how long it may, and what is not such a wait."""

import pytest

from flwr_distill.server.grid import nodes
from flwr_distill.server.roster import TooFewNodesError
from tests.grids import answering, messages_to, plain_grid

DEADLINE = 100.0


class Clock:
    now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(nodes, "time", clock)
    return clock


@pytest.fixture
def grid(memory_grid, clock):
    return plain_grid(memory_grid(dict.fromkeys((1, 2), answering(x=1))), deadline=DEADLINE)


def waits(grid, clock, pause, seconds):
    """Poll for more nodes than there are."""
    end = clock.now + seconds
    while clock.now < end:
        assert len(grid.get_node_ids()) == 2
        clock.sleep(pause)


def test_a_wait_for_more_nodes_ends_after_phase_timeout_with_what_it_wants(grid, clock):
    grid.nodes.wanted = "min_available_nodes = 3"
    waits(grid, clock, 1, DEADLINE)
    with pytest.raises(TooFewNodesError, match=r"phase-timeout = 100 s .*min_available_nodes = 3"):
        waits(grid, clock, 1, DEADLINE)


def test_a_new_wait_may_last_as_long(grid, clock):
    with pytest.raises(TooFewNodesError):
        waits(grid, clock, 1, 2 * DEADLINE)
    waits(grid, clock, 1, DEADLINE)


def test_a_strategy_that_sends_messages_does_not_wait(grid, clock):
    for _ in range(5):
        waits(grid, clock, 1, DEADLINE / 2)
        grid.send_and_receive(messages_to([1, 2], "query.x"))


def test_a_strategy_that_computes_between_two_polls_does_not_wait(grid, clock):
    waits(grid, clock, DEADLINE / 5, 5 * DEADLINE)
