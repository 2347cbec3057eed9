"""Hooks see a run's events in order, and one of another package never harms the run."""

import random
from functools import partialmethod

import pytest
from flwr.serverapp.strategy import FedAvg
from safetensors.numpy import load_file

from flwr_distill.server import app
from flwr_distill.server.hooks import Hook, Hooks
from flwr_distill.server.record.hooks import Report
from flwr_distill.server.rounds import NothingLearntError
from tests.server.run_folder import journal, rows

EVENTS = ("run_start", "phase", "round_end", "checkpoint", "failure", "run_end")


class Notes(Hook):
    """Notes what it is called with; raises at the events in `fails_at`."""

    def __init__(self, *fails_at):
        self.calls = []
        self._fails_at = fails_at

    def events(self):
        return [event for event, _ in self.calls]

    def note(self, event, value, *_):
        self.calls.append((event, value))
        if event in self._fails_at:
            raise RuntimeError(f"no {event} here")


for event in EVENTS:
    setattr(Notes, f"on_{event}", partialmethod(Notes.note, event))


@pytest.fixture
def run(play, monkeypatch):
    """Run our ServerApp with others' hooks; give the run's folder."""

    def run(others=(), **settings):
        named = {f"other{i}": hook for i, hook in enumerate(others)}
        monkeypatch.setattr(app, "find_hooks", lambda names: named)
        quick = {"partition.scheme": "iid", "fraction-train": 0.5}
        return play(quick, nodes=2, **settings)

    return run


def fails_to_train(node, message):
    return message.metadata.message_type == "train"


def test_a_hook_sees_start_phases_rounds_checkpoints_and_end_in_order(run):
    notes = Notes()
    folder = run([notes])
    round_ = ["phase", "round_end", "checkpoint"]
    assert notes.events() == ["run_start", *round_[1:], *round_, *round_, "run_end"]
    (_, start), *calls, (_, end) = notes.calls
    assert (start.folder, start.rows, len(start.nodes)) == (folder, (), 2)
    assert [phase.name for event, phase in calls if event == "phase"] == ["train"] * 2
    assert [phase.round for event, phase in calls if event == "phase"] == [1, 2]
    assert [vars(call.row) for event, call in calls if event == "round_end"] == rows(folder)
    assert set(end.model) == set(load_file(folder / "model.safetensors"))


def test_files_are_written_by_the_time_another_hook_sees_the_event(run):
    class Reader(Hook):
        def on_run_start(self, run):
            self.folder = run.folder

        def on_round_end(self, end):
            assert len(rows(self.folder)) == end.row.round + 1

        def on_checkpoint(self, checkpoint):
            stored = self.folder / "checkpoints" / f"round-{checkpoint.round:06d}.safetensors"
            assert stored.exists()

        def on_run_end(self, end):
            assert (self.folder / "report.html").exists()
            (self.folder / "seen").touch()

    folder = run([Reader()])
    assert (folder / "seen").exists()
    assert journal(folder, "warning") == []


@pytest.mark.parametrize("event", [event for event in EVENTS if event != "failure"])
def test_a_hook_that_fails_is_named_and_switched_off_and_the_run_and_others_continue(run, event):
    broken, notes = Notes(event), Notes()
    folder = run([broken, notes])
    assert (folder / "summary.json").exists()
    assert broken.events().count(event) == 1
    assert broken.events()[-1] == event
    assert notes.events()[-1] == "run_end"
    (line,) = journal(folder, "warning")
    assert "other0" in line["warning"]
    assert f"on_{event}" in line["warning"]


def test_a_failure_reaches_hooks_also_after_one_has_failed(run):
    notes = Notes("failure")
    with pytest.raises(NothingLearntError):
        run([notes], broken=fails_to_train)
    assert notes.events()[-1] == "failure"
    assert isinstance(notes.calls[-1][1], NothingLearntError)


@pytest.mark.parametrize(
    ("method", "settings"), [("on_failure", {"broken": fails_to_train}), ("on_run_end", {})]
)
def test_one_of_ours_that_fails_ends_the_run_and_the_failure_reaches_others(
    run, monkeypatch, method, settings
):
    def full(*_):
        raise ValueError("no report")

    notes = Notes()
    monkeypatch.setattr(Report, method, full)
    with pytest.raises(ValueError, match="no report"):
        run([notes], **settings)
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
def test_a_run_assigns_no_method_of_a_strategy(run, strategy):
    folder = run(strategy=f"{strategy.__module__}:{strategy.__qualname__}")
    assert (folder / "summary.json").exists()
