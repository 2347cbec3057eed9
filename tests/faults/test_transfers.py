"""A transfer that breaks off continues: what has arrived is not sent again."""

import threading
import time

import pytest

from benchmarks.rounds import APP_DIR
from tests.faults.conftest import Federation
from tests.faults.plays import WiredFederation

MEGABYTES = 24
PIECE = 5 * 2**20
"""Bytes of Flower's pieces of a message, the most that a break can cost."""
AROUND = 10**6
"""Bytes of heartbeats, polls, and headers."""


class Lone(WiredFederation):
    """One node, whose link is so slow that a transfer takes seconds."""

    def __init__(self, folder):
        self.wires, self.paths = {}, {}
        self.own_settings = {0: {"max-rate": 40.0}}
        Federation.__init__(self, folder, num_nodes=1)


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    with Lone(tmp_path_factory.mktemp("transfers")) as federation:
        yield federation


def restart_superlink(federation):
    """As after a power cut: all that is not in its database is gone."""
    federation.restart_superlink()


def break_connections(federation):
    """As a router that forgets its connections does."""
    federation.wires[0].break_all()


@pytest.mark.parametrize("fault", [break_connections, restart_superlink])
def test_a_transfer_that_breaks_off_costs_no_more_than_the_piece_on_the_way(federation, fault):
    wire, done = federation.wires[0], []
    before = {way: getattr(wire, way) for way in ("to_node", "to_server")}

    def moved(way):
        return getattr(wire, way) - before[way]

    def run():
        settings = {"work": "negated", "megabytes": MEGABYTES, "phases": 1, "nodes": 1}
        more = {"fast": True, "share": 1.0}
        done.append(federation.run(APP_DIR, {**settings, **more}, timeout=120))

    running = threading.Thread(target=run)
    running.start()
    for way in before:
        while moved(way) < MEGABYTES * 1e6 / 2:
            assert running.is_alive(), done[0].lines[-20:]
            time.sleep(0.01)
        fault(federation)
    running.join(120)
    (outcome,) = done
    assert outcome.completed, outcome.lines[-20:]
    for way in before:
        assert MEGABYTES * 1e6 < moved(way) < MEGABYTES * 1e6 + PIECE + AROUND, way
