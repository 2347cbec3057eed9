"""What the recorder leaves in a run's folder."""

import base64
import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from server.page import read_run, write_report


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


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
