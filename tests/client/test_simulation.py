"""Processes of a simulation take turns, and none waits for another without end."""

import time

import pytest

from flwr_distill.client import simulation


def test_a_lock_that_another_process_keeps_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(simulation, "LOCK_TIMEOUT", 0.1)
    file = tmp_path / "new" / "lock"
    with simulation.locked(file):
        start = time.monotonic()
        refused = pytest.raises(TimeoutError, match="another process keeps it locked")
        with refused, simulation.locked(file):
            pass
        assert time.monotonic() - start < 5
    with simulation.locked(file):
        pass
