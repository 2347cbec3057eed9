"""What the dashboard says of nodes and runs, by what SuperLink, files and this machine say."""

import json
import time

import pytest

from flwr_distill.fleet.dashboard.alarms import alarms
from flwr_distill.fleet.dashboard.nodes import LocalNode, all_nodes, size_class
from flwr_distill.fleet.dashboard.runs import STALE
from flwr_distill.fleet.dashboard.watch import Place, Watch
from flwr_distill.flower.control import KnownNode, OutageError

from .superlink import FakeControl, known_run
from .test_files import write

NODE = "8000000000000000007"


@pytest.fixture
def place(tmp_path):
    (tmp_path / "runs").mkdir()

    def make(**answers):
        control = FakeControl(**answers)
        return Place("here:9093", lambda: control, tmp_path / "runs", tmp_path / "state")

    return make


def of_run(place, run_id, **phase):
    now = round(time.time(), 1)
    return write(
        place.runs_dir / str(run_id),
        settings_json={"strategy": "hfldd", "dataset": "digits", "num-rounds": 9},
        about_json={"nodes": {NODE: {"name": "ward-3", "samples": 250, "version": "0.1.0"}}},
        metrics_jsonl='{"round": 2, "accuracy": 0.5, "seconds": 3}\n',
        journal_jsonl=json.dumps(
            {"round": 1, "time": 5.0, "failed": NODE, "reply_to": "train", "reason": "no disk"}
        )
        + "\n",
        phase_json={"run": str(run_id), "time": now, "since": now, "asked": 3} | phase,
    )


def test_a_live_run_names_its_phase_and_whom_it_awaits(place):
    here = place(nodes=[KnownNode(int(NODE), "online", 1.0)], runs=[known_run(5)])
    of_run(here, 5, phase="nodes train", awaited=["ward-3"], others=1)
    snapshot = Watch(here).read()
    (run,), (node,) = snapshot.live, snapshot.nodes
    assert (run.phase.title, run.phase.missing, run.phase.asked) == ("nodes train", 2, 3)
    assert (node.name, node.size, node.version) == ("ward-3", "100 to 1,000", "0.1.0")
    assert "nodes train" in node.work
    assert "no disk" in node.error


def test_a_phase_that_is_no_longer_updated_is_not_shown(place):
    here = place(runs=[known_run(5)])
    of_run(here, 5, phase="nodes train", awaited=["ward-3"], time=time.time() - 2 * STALE)
    assert Watch(here).read().live[0].phase is None


def test_a_failed_run_is_an_alarm_with_its_reason_even_if_it_never_met_a_node(place):
    here = place(runs=[known_run(5, "finished:failed", "cannot import app", time.time())])
    (alarm,) = [each for each in alarms(Watch(here).read()) if each.link.startswith("/runs")]
    assert "cannot import app" in alarm.text


def test_a_resumed_run_is_shown_in_the_folder_of_the_first_and_no_run_speaks_for_another(place):
    resuming = known_run(6, resumes="5")
    others = [known_run(5, "finished:failed"), known_run(7), known_run(8), known_run(9)]
    here = place(runs=[resuming, *others])
    of_run(here, 5, run="6")
    of_run(here, 7, run="5")  # of another run, which claims to be that one
    of_run(here, 8, run="9")  # that one resumes nothing
    runs = {run.run_id: run for run in Watch(here).read().runs}
    assert runs["6"].folder.name == "5"
    assert runs["5"].folder is None
    assert "6" in runs["5"].title
    assert runs["7"].folder.name == "7"
    assert runs["8"].folder.name == "8"
    assert runs["9"].folder is None


def test_forged_folders_hide_no_run_of_the_superlink(place):
    here = place(runs=[known_run(5, "finished:completed")])
    of_run(here, 5)
    for number in range(150):
        about = {"started": "9990-01-01T00:00:00+00:00"}
        write(here.runs_dir / f"forged-{number}", settings_json={}, about_json=about)
    assert "5" in [run.run_id for run in Watch(here).read().runs]


def test_a_superlink_that_does_not_answer_is_an_alarm_and_runs_are_still_shown(place):
    def away():
        raise OutageError("is away")

    here = place()
    of_run(here, 5)
    snapshot = Watch(Place("here:9093", away, here.runs_dir, here.state_dir)).read()
    assert any("is away" in alarm.text for alarm in alarms(snapshot))
    assert [run.state for run in snapshot.runs] == ["unfinished"]


def test_the_loss_of_the_superlink_is_one_alarm_with_its_consequences(place):
    here = place(nodes=[KnownNode(int(NODE), "online", 1.0)], runs=[known_run(5)])
    of_run(here, 5)
    watch = Watch(here)
    watch.read()
    here.control().answers = None
    snapshot = watch.read()
    (alarm,) = [alarm for alarm in alarms(snapshot) if "disk" not in alarm.text.lower()]
    assert alarm.text.endswith("cut off: 1. Runs that are interrupted: 5")
    assert alarm.since == snapshot.away_since
    assert [node.status for node in snapshot.nodes] == ["cut off"]


def test_a_run_that_waits_longer_than_usual_and_a_node_that_failed_need_attention(place):
    here = place(nodes=[KnownNode(int(NODE), "online", 1.0)], runs=[known_run(5)])
    waits = {"phase": "nodes train", "awaited": ["ward-3"], "asked": 3}
    of_run(here, 5, **waits, since=time.time() - 5)
    assert not [alarm for alarm in alarms(Watch(here).read()) if "waits for" in alarm.text]
    of_run(here, 5, **waits, since=time.time() - 60)
    (alarm,) = [alarm for alarm in alarms(Watch(here).read()) if "waits for" in alarm.text]
    assert "ward-3" in alarm.text
    folder = here.runs_dir / "5"
    failed = {"round": 2, "time": 9.0, "failed": NODE, "reply_to": "train", "reason": "no memory"}
    with (folder / "journal.jsonl").open("a") as file:
        file.write(json.dumps({"round": 2, "warning": "1 failed: ward-3: no memory"}) + "\n")
        file.write(2 * (json.dumps(failed) + "\n"))
    snapshot = Watch(here).read()
    assert [alarm for alarm in alarms(snapshot) if "no memory" in alarm.text]
    assert [(p.kind, p.count) for p in snapshot.live[0].problems] == [("failed", 2), ("failed", 1)]


def test_a_local_node_that_is_down_comes_first_with_the_last_line_of_its_log(tmp_path):
    online = KnownNode(3, "online", 1.0)
    gone = KnownNode(4, "offline", 1.0)
    local = [
        LocalNode("node-0", tmp_path, node_id=3, runs=True),
        LocalNode("node-1", tmp_path, last_line="No space left on device"),
    ]
    first, second, *_ = all_nodes([online, gone], [], local, {})
    assert (first.name, first.status, first.error) == (
        "node-1",
        "not running",
        "No space left on device",
    )
    assert not second.is_online


def test_registered_nodes_have_their_names_before_any_run():
    (node,) = all_nodes([KnownNode(3, "online", 1.0, "key-a")], [], [], {"key-a": "ward-3"})
    assert node.name == "ward-3"


@pytest.mark.parametrize(
    ("samples", "words"),
    [(0, "under 100"), (100, "100 to 1,000"), (10**6, "1,000,000 or more"), (None, "")],
)
def test_sizes_of_data_are_shown_as_classes(samples, words):
    assert size_class(samples) == words
