"""Hooks see a run's events in order, and one of another package never harms the run."""

import json
import random

import pytest
from flwr.app import Context, RecordDict
from flwr.serverapp.strategy import FedAvg
from safetensors.numpy import load_file

from flwr_distill.server import app
from flwr_distill.server.app import main
from flwr_distill.server.hooks import Hook, Hooks
from flwr_distill.server.record.hooks import Report
from flwr_distill.server.rounds import NothingLearntError

NODES = 2
QUICK = {
    "strategy": "fedavg",
    "num-rounds": 2,
    "min-nodes": NODES,
    "partition.scheme": "iid",
    "train.local-epochs": 1,
    "fraction-train": 0.5,
}
EVENTS = ("run_start", "phase", "round_end", "checkpoint", "failure", "run_end")
pytestmark = pytest.mark.usefixtures("without_pictures")


class Notes(Hook):
    """Notes what it is called with; raises at the events in `fails_at`."""

    def __init__(self, *fails_at):
        self.calls = []
        self._fails_at = fails_at

    def events(self):
        return [event for event, _ in self.calls]

    def _note(self, event, value):
        self.calls.append((event, value))
        if event in self._fails_at:
            raise RuntimeError(f"no {event} here")

    def on_run_start(self, run):
        self._note("run_start", run)

    def on_phase(self, phase):
        self._note("phase", phase)

    def on_round_end(self, end):
        self._note("round_end", end)

    def on_checkpoint(self, checkpoint):
        self._note("checkpoint", checkpoint)

    def on_failure(self, error, model):
        self._note("failure", error)

    def on_run_end(self, end):
        self._note("run_end", end)


@pytest.fixture
def play(client_grid, tmp_path, monkeypatch):
    """Run our ServerApp with others' hooks; give the run's folder."""

    def play(broken=lambda node, message: False, name="1", others=(), **settings):
        named = {f"other{i}": hook for i, hook in enumerate(others)}
        monkeypatch.setattr(app, "find_hooks", lambda names: named)
        config = {**QUICK, "runs-dir": str(tmp_path), **settings}
        main(client_grid(NODES, config, broken), Context(int(name), 1, {}, RecordDict(), config))
        return tmp_path / name

    return play


def lines(folder):
    return [json.loads(line) for line in (folder / "journal.jsonl").open()]


def test_a_hook_sees_start_phases_rounds_checkpoints_and_end_in_order(play):
    notes = Notes()
    folder = play(others=[notes])
    round_ = ["phase", "round_end", "checkpoint"]
    assert notes.events() == ["run_start", *round_[1:], *round_, *round_, "run_end"]
    (_, start), *calls, (_, end) = notes.calls
    assert (start.folder, start.rows, len(start.nodes)) == (folder, (), NODES)
    assert [phase.name for event, phase in calls if event == "phase"] == ["train"] * 2
    assert [phase.round for event, phase in calls if event == "phase"] == [1, 2]
    rows = [vars(call.row) for event, call in calls if event == "round_end"]
    assert rows == [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert set(end.model) == set(load_file(folder / "model.safetensors"))


def test_files_are_written_by_the_time_another_hook_sees_the_event(play):
    class Reader(Hook):
        def on_run_start(self, run):
            self.folder = run.folder

        def on_round_end(self, end):
            rows = (self.folder / "metrics.jsonl").read_text().splitlines()
            assert len(rows) == end.row.round + 1

        def on_checkpoint(self, checkpoint):
            stored = self.folder / "checkpoints" / f"round-{checkpoint.round:06d}.safetensors"
            assert stored.exists()

        def on_run_end(self, end):
            assert (self.folder / "report.html").exists()
            (self.folder / "seen").touch()

    folder = play(others=[Reader()])
    assert (folder / "seen").exists()
    assert not [line for line in lines(folder) if "warning" in line]


@pytest.mark.parametrize("event", [event for event in EVENTS if event != "failure"])
def test_a_hook_that_fails_is_named_and_switched_off_and_the_run_and_others_continue(play, event):
    broken, notes = Notes(event), Notes()
    folder = play(others=[broken, notes])
    assert (folder / "summary.json").exists()
    assert broken.events().count(event) == 1
    assert broken.events()[-1] == event
    assert notes.events()[-1] == "run_end"
    (warning,) = [line["warning"] for line in lines(folder) if "warning" in line]
    assert "other0" in warning
    assert f"on_{event}" in warning


def test_a_failure_reaches_hooks_also_after_one_has_failed(play):
    notes = Notes("failure")
    with pytest.raises(NothingLearntError):
        play(lambda node, message: message.metadata.message_type == "train", others=[notes])
    assert notes.events()[-1] == "failure"
    assert isinstance(notes.calls[-1][1], NothingLearntError)


def test_a_failure_reaches_hooks_where_the_report_cannot_be_written(play, monkeypatch):
    def full(self, error, model):
        raise ValueError("no report")

    notes = Notes()
    monkeypatch.setattr(Report, "on_failure", full)
    with pytest.raises(ValueError, match="no report"):
        play(lambda node, message: message.metadata.message_type == "train", others=[notes])
    assert notes.events()[-1] == "failure"


def test_one_of_ours_that_fails_ends_the_run(play, monkeypatch):
    def broken(self, end):
        raise ValueError("no report")

    monkeypatch.setattr(Report, "on_run_end", broken)
    notes = Notes()
    with pytest.raises(ValueError, match="no report"):
        play(others=[notes])
    assert notes.events()[-1] == "failure"


@pytest.mark.parametrize("fails_at", [(), ("run_start",)])
def test_a_hook_that_seeds_random_numbers_does_not_change_which_nodes_are_sampled(fails_at):
    class Seeds(Notes):
        def on_run_start(self, run):
            random.seed(7)
            super().on_run_start(run)

    random.seed(3)
    expected = random.random()
    random.seed(3)
    Hooks(others={"seeds": Seeds(*fails_at)}).on_run_start(None)
    assert random.random() == expected


def test_others_get_no_event_before_the_run_has_started():
    notes = Notes()
    hooks = Hooks(others={"notes": notes})
    hooks.on_phase(None)
    assert notes.calls == []
    hooks.on_run_start(None)
    hooks.on_phase(None)
    assert notes.events() == ["run_start", "phase"]


class Untouched(FedAvg):
    """Fails if a method of the instance was assigned over its class's."""

    def aggregate_evaluate(self, server_round, replies):
        assert not [name for name in vars(self) if callable(getattr(type(self), name, None))]
        return super().aggregate_evaluate(server_round, replies)


class UntouchedLoop(Untouched):
    def start(self, *args, **kwargs):
        return super().start(*args, **kwargs)


@pytest.mark.parametrize("strategy", [Untouched, UntouchedLoop])
def test_a_run_assigns_no_method_of_a_strategy(play, strategy):
    folder = play(strategy=f"{strategy.__module__}:{strategy.__qualname__}")
    assert (folder / "summary.json").exists()
