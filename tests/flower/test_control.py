"""`flwr-distill run` and `stop` work on whichever Flower is installed (`make test-flower`)."""

import os
import subprocess
from contextlib import contextmanager

import pytest

from benchmarks.flower_federation import OUR_PACKAGES
from flwr_distill.flower import flwr_command
from flwr_distill.flower.control import OutageError, SuperLinkError, open_control
from tests.environments import PROGRAM

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(600)]
TRAIN = 'strategy="fedavg" min-nodes=3 '


@contextmanager
def started(stock, *words):
    process = subprocess.Popen(
        [*PROGRAM, *words, "--superlink", stock.control, "--insecure"],
        cwd=stock.folder,
        env={**os.environ, **OUR_PACKAGES, "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(stock, *words):
    with started(stock, *words) as process:
        output, _ = process.communicate(timeout=400)
        return process.returncode, output


def trains(stock, name):
    folder = stock.folder / name
    code, output = ended(stock, "run", "-c", f'{TRAIN} num-rounds=1 runs-dir="{folder}"')
    assert code == 0, output
    assert "Results in" in output
    (summary,) = folder.glob("*/summary.json")
    assert summary.parent.name in output


@pytest.mark.deployment("`run` to its end, and its exit code")
def test_a_run_is_followed_to_its_end_and_the_exit_code_is_how_it_ended(stock):
    trains(stock, "control")
    code, output = ended(stock, "run", "-c", f'{TRAIN} dataset="no-such-set"')
    assert code == 1, output
    assert "failed:" in output


@pytest.mark.deployment("`stop RUN`, and the next run")
def test_a_run_is_stopped_and_the_next_one_finds_its_nodes(stock):
    with started(stock, "run", "-c", f"{TRAIN} num-rounds=10000") as process:
        lines = iter(process.stdout)
        run_id = next(line.split()[-1] for line in lines if "started run" in line)
        assert next(line for line in lines if "Round" in line or "round" in line)
        code, output = ended(stock, "stop", "latest")
        assert (code, run_id in output) == (0, True), output
        output = "".join(lines)
        assert process.wait(60) == 1
        assert "was stopped" in output
    trains(stock, "after a stop")


@pytest.fixture(params=["line", "command"])
def open_one(request):
    """What opens a Control API on this line, and Flower's command, which any has."""
    return open_control if request.param == "line" else flwr_command.Control


def test_a_run_that_nobody_knows_is_no_outage_and_silence_is(stock, open_one):
    with open_one(stock.control) as control:
        control.wait(60)
        assert [node.status for node in control.nodes()] == 3 * ["online"]
        with pytest.raises(SuperLinkError) as refused:
            control.run_status(77)
        assert not isinstance(refused.value, OutageError)
    with open_one("127.0.0.1:1") as control, pytest.raises(OutageError):
        control.run_status(77)
