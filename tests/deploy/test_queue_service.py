"""The queue's service with a real SuperLink, nodes and command, while its parts are killed."""

import os

import pytest

from benchmarks.chaos import Federation, started_twice
from flwr_distill.fleet.queue.door import FILE
from flwr_distill.fleet.queue.entry import State
from flwr_distill.fleet.queue.file import read_queue
from tests.cli.commands import assert_refused, command
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not hasattr(os, "O_PATH"), reason="needs Linux")
RUN = ("-c", 'strategy="fedavg" num-rounds=1 min-nodes=2')


def waited(federation, condition):
    def runs():
        return read_queue(federation.state_dir / FILE, ended=100)

    wait_until(lambda: condition(runs()), 120, runs)
    return {run.id: run for run in runs()}


def test_a_queue_outlives_superlink_and_service_and_a_hung_run_ends_by_its_timeout(tmp_path):
    with Federation(2, tmp_path, at_once=1) as federation:
        here = ("--state-dir", federation.state_dir)

        def submitted(*words):
            result = command("run", "--queue", *here, *RUN, *words)
            assert result.exit_code == 0, result.output

        submitted("-c", "min-nodes=99", "--timeout", "8")  # waits for nodes until that
        submitted("--after", "1")
        submitted("--priority", "-1")
        submitted()
        submitted("--after", "4")
        waited(federation, lambda runs: runs[0].state is State.RUNNING)
        assert command("queue", "cancel", "3", *here).exit_code == 0
        federation.kill_superlink()
        federation.kill_queue()
        assert_refused(command("run", "--queue", *here, *RUN), "flwr-distill queue serve")
        federation.start_superlink()
        federation.start_queue()
        assert command("queue", "wait", "5", *here).exit_code == 0
        runs = waited(federation, lambda runs: all(run.state.ended for run in runs))
        listed = command("queue", *here).output
        twice = started_twice(federation.state_dir / FILE, federation.database)
    states = (State.STOPPED, State.SKIPPED, State.CANCELLED, State.COMPLETED, State.COMPLETED)
    assert {number: run.state for number, run in runs.items()} == dict(enumerate(states, start=1))
    assert "timeout" in runs[1].why
    assert all(state in listed for state in states)
    assert twice == (0, 0)


def test_options_of_the_queue_are_refused_where_they_mean_nothing(tmp_path):
    here = ("--state-dir", tmp_path)
    assert_refused(command("run", *here, "--priority", "1"), "add --queue")
    assert_refused(command("run", "--queue", *here, "--superlink", "127.0.0.1:9"), "drop")
    assert_refused(command("queue", "serve", *here), "no federation runs here")
