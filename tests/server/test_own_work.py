"""A server that works for longer than a phase may take says so, and where."""

import logging
import threading
import time

from flwr_distill.server import own_work
from flwr_distill.server.grid.transport import Transport


def test_long_work_is_named_once_with_its_place_but_no_phase_is(memory_grid, monkeypatch, caplog):
    monkeypatch.setattr(own_work, "EVERY", 0.01)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    caplog.set_level(logging.WARNING, "flwr")
    transport = Transport(memory_grid({}), 5.0)

    def aggregates_forever():
        threading.Event().wait(0.3)

    with own_work.OwnWork(transport, 0.05):
        aggregates_forever()
        (text,) = caplog.messages
        assert "aggregates_forever (test_own_work.py:" in text
        assert "flwr-distill stop" in text
        transport.idle_since = None  # a phase, which has a deadline
        time.sleep(0.2)
        assert len(caplog.messages) == 1
        transport.idle_since = time.monotonic()
        time.sleep(0.2)
        assert len(caplog.messages) == 2
    transport.idle_since = time.monotonic()
    time.sleep(0.2)
    assert len(caplog.messages) == 2
