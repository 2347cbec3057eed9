"""What the recorder leaves in a run's folder."""

import base64
import json
import logging
import re

import pytest
from flwr.app import ArrayRecord, MetricRecord
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flwr_distill.server.grid.ledger import Ledger
from flwr_distill.server.hooks import Hooks, RoundEnd, RunEnd, RunStart
from flwr_distill.server.page.run_files import read_run
from flwr_distill.server.page.run_page import write_report
from flwr_distill.server.record.history import History
from flwr_distill.server.record.hooks import hooks_of_run
from flwr_distill.server.record.journal import Journal
from flwr_distill.server.settings import RunSettings
from tests.server.run_folder import rows


def test_rows_tell_accuracy_by_class_and_null_for_a_class_without_samples(finished_run):
    found = rows(finished_run(accuracies=(0.25, 0.75)))
    assert [row["class_accuracy"] for row in found] == [[0.25, None], [0.75, None]]


def test_tensorboard_reads_the_rows_back(finished_run):
    folder = finished_run(accuracies=(0.25, 0.75))
    events = EventAccumulator(str(folder))
    events.Reload()
    read = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    for key in ("accuracy", "loss", "server_bytes", "link_bytes", "seconds"):
        assert read[key] == [(row["round"], pytest.approx(row[key])) for row in rows(folder)]
    assert read["class_accuracy/0"] == read["accuracy"]
    assert "class_accuracy/1" not in read


def test_journal_has_the_round_that_a_phase_belongs_to(finished_run):
    journal = read_run(finished_run()).journal
    assert [entry["round"] for entry in journal if "phase" in entry] == [1, 2]
    assert [entry["round"] for entry in journal if "warning" in entry] == [1, 2]


def test_what_a_strategy_leaves_is_kept_and_a_picture_of_virtual_data_shown(finished_run):
    artifacts = {"virtual.png": b"a picture", "virtual.safetensors": b"tensors", "../up": b"no"}
    folder = finished_run(strategy="fedlgd", artifacts=artifacts)
    assert (folder / "virtual.safetensors").read_bytes() == b"tensors"
    shown = base64.b64encode(b"a picture").decode()
    assert f"data:image/png;base64,{shown}" in (folder / "report.html").read_text()
    assert (folder / "up").exists()
    assert not (folder.parent / "up").exists()


def test_a_run_writes_its_report_and_the_files_give_the_same_again(finished_run):
    folder = finished_run()
    written = (folder / "report.html").read_text()
    assert write_report(folder).read_text() == written


@pytest.mark.parametrize(
    ("accuracies", "reached"),
    [((0.1, 0.79, 0.8, 0.9), 2), ((0.8, 0.5), 0), ((0.1, 0.79), None), ((0.0, 1.0), 1)],
)
def test_the_summary_tells_the_first_round_with_80_percent(finished_run, accuracies, reached):
    folder = finished_run(accuracies=accuracies)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["rounds"], summary["accuracy"]) == (reached, accuracies[-1])


def test_a_resumed_run_goes_on_with_its_clock_and_tells_the_time_that_is_left(tmp_path, flower_log):
    flower_log.set_level(logging.INFO)
    numbers = {"accuracy": 0.5, "loss": 1.0, "server_bytes": 7, "link_bytes": 0}
    before = [{"round": i, "seconds": 20.0 + 100 * i, **numbers} for i in (0, 1)]
    state = {"started": "2026-01-05T12:00:00+00:00", "rows": json.dumps(before)}
    state |= {"topology": {}, "heads": {}, "traffic": None}
    settings = RunSettings.from_run_config({"num-rounds": 5})
    journal = Journal(tmp_path / "journal.jsonl")
    history = History(Ledger(), journal, state)
    with hooks_of_run(tmp_path, settings, history) as own:
        hooks = Hooks(journal, *own)
        hooks.on_run_start(
            RunStart(1, tmp_path, settings.model_dump(by_alias=True), {}, history.rows)
        )
        row = history.end_round(2, MetricRecord({"accuracy": 0.4, "loss": 1.5}), None)
        hooks.on_round_end(RoundEnd(row, None, None))
    assert [row["round"] for row in rows(tmp_path)] == [0, 1, 2]
    assert 120 <= rows(tmp_path)[-1]["seconds"] < 125
    # 100 s and a little for two rounds, and three are left
    assert re.search(r"^round   2/5 .* left 2:3\d$", flower_log.messages[-1])
    assert journal.round == 3
    assert history.best_round == 0
    hooks.on_run_end(RunEnd(ArrayRecord(), {}, {}, (), None))
