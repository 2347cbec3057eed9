"""The comparison with other systems times what they did, and names those that did nothing."""

import json
import sys

import psutil
import pytest

from benchmarks.peers.environments import NotInstalledError, Project, prepare
from benchmarks.peers.harness import SetUp, as_json, measure, show, timed
from benchmarks.peers.systems import APART, PLAIN, WORKERS, System

SET_UP = SetUp(clients=4, a_round=2, rounds=3)
STEPS = 10
NOWHERE = Project("nowhere", "1.0", "", pythons=("9.9",))
ROUNDS = """
import json, os, time
folder = json.loads(os.environ["FLWR_DISTILL_PEERS"])["folder"]
with open(folder + "/rounds.jsonl", "w") as file:
    for _ in range({rounds}):
        print(json.dumps({{"at": time.time(), "steps": {steps}, "change": {change}}}), file=file)
        time.sleep(0.05)
"""


def system(name="a system", *, rounds=3, steps=STEPS, change=0.1, more="", started=None):
    """One that says it has trained."""
    code = ROUNDS.format(rounds=rounds, steps=steps, change=change) + more

    def start(work):
        if started is not None:
            started.append(name)
        return [sys.executable, "-c", code], {}

    return System(name, start)


def measured(systems, folder, repeats=1):
    (*_, rows) = measure(systems, SET_UP, folder, repeats=repeats)
    return rows


@pytest.mark.matrix
def test_plain_loops_and_ours_train_all_clients_of_all_rounds(tmp_path):
    rows = measured([PLAIN, APART, WORKERS], tmp_path)
    plain, apart, ours = as_json(rows)["rows"]
    systems = ["plain loop", "plain loops apart", "ours, workers"]
    assert [row["system"] for row in (plain, apart, ours)] == systems
    assert [row["error"] for row in (plain, apart, ours)] == [None] * 3
    assert plain["ratio"] == 1
    for row in (plain, apart, ours):
        assert row["set-up"] == "2 of 4"
        for name in ("clients_per_second", "startup_seconds", "megabytes", "ratio"):
            assert row[name] > 0, name
    assert ours["megabytes"] > plain["megabytes"]  # of several processes


def test_the_first_round_counts_as_start_up_alone():
    speed, startup = timed(100.0, [109.0, 110.0, 111.0, 114.0], a_round=5)
    assert speed == 5 * 3 / 5
    assert startup == 9 - 1


def test_another_system_begins_each_time(tmp_path):
    started = []
    measured([system(name, started=started) for name in "abc"], tmp_path, repeats=2)
    assert "".join(started) == "abcbca"


@pytest.mark.parametrize(
    "broken",
    [
        system(rounds=2),
        system(steps=STEPS - 1),
        system(change=0),
        system(change="float('nan')"),
        System("not installed", lambda work: ([], {}), NOWHERE),
        System("not a program", lambda work: (["no-such-program"], {})),
    ],
    ids=["round missing", "steps missing", "same model", "no number", "environment", "program"],
)
def test_a_system_that_did_not_train_is_a_row_with_its_error(broken, tmp_path, capsys):
    rows = measured([broken, system("another")], tmp_path, repeats=2)
    show(rows)
    assert broken.name in capsys.readouterr().out
    bad, good = as_json(rows)["rows"]
    assert bad["error"]
    assert bad["clients_per_second"] is bad["ratio"] is bad["megabytes"] is None
    assert good["error"] is None
    assert good["clients_per_second"] > 0
    json.dumps(bad, allow_nan=False)


def test_a_crash_after_the_last_round_is_no_failure(tmp_path):
    (row,) = measured([system(more="os.abort()")], tmp_path)
    assert not row.error


def test_nothing_that_a_system_started_is_left(tmp_path):
    more = f"""
import subprocess
left = subprocess.Popen(["sleep", "100"], start_new_session=True)
open({str(tmp_path / "pid")!r}, "w").write(str(left.pid))
time.sleep(1.5)
"""
    measured([system(more=more)], tmp_path)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_an_environment_that_is_there_is_not_made_again(tmp_path):
    python = tmp_path / NOWHERE.name / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho 1.0\n")
    python.chmod(0o755)
    assert prepare(NOWHERE, tmp_path) == python.parent
    python.write_text("#!/bin/sh\necho 0.9\n")
    with pytest.raises(NotInstalledError):
        prepare(NOWHERE, tmp_path)
