"""`flwr-distill runs` and `report` at their command lines, and the table of results."""

import io
import json
import os
import re
import subprocess
import sys
import time

import pytest
import torch
from rich.console import Console

from flwr_distill.cli.run_log import results_table

from .commands import assert_refused, command


def started(folder, time):
    file = folder / "about.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"started": time}))


def invoke(*arguments, env=()):
    return command("runs", *arguments, env=env)


def test_runs_are_listed_by_age_with_what_came_out(finished_run):
    first = finished_run("22", strategy="fedavg", accuracies=(0.1, 0.6))
    second = finished_run("11", strategy="hfldd", accuracies=(0.1, 0.7))
    started(first, "2026-01-01T00:00:00+00:00")
    (second.parent / "demo-federation").mkdir()
    (second / "summary.json").unlink()
    lines = invoke("list", "--runs-dir", first.parent).output.splitlines()
    shown = [line.replace("│", " ").split() for line in lines if "digits" in line]
    assert [row[0] for row in shown] == ["22", "11"]
    assert "done fedavg digits 1/1 60.0 %" in " ".join(shown[0])
    assert "killed hfldd digits 1/1 70.0 %" in " ".join(shown[1])


@pytest.mark.parametrize("command", ["list", "show"])
def test_runs_are_read_without_pytorch(finished_run, command):
    """It takes seconds and hundreds of megabytes."""
    folder = finished_run("22")
    name = [folder.name] if command == "show" else []
    arguments = ["runs", command, *name, "--runs-dir", str(folder.parent)]
    program = (
        "import sys; from flwr_distill.cli.main import app; "
        "app(sys.argv[1:], standalone_mode=False); print('torch' in sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60
    )
    assert ended.stdout.splitlines()[-1:] == ["False"], ended.stderr


def test_a_list_says_which_runs_failed_and_what_only_nodes_know(finished_run):
    failed = finished_run("22", accuracies=(0.1, 0.2))
    (failed / "summary.json").unlink()
    with (failed / "journal.jsonl").open("a") as journal:
        journal.write(json.dumps({"error": "The run failed."}) + "\n")
    on_nodes = finished_run("11", accuracies=(0.1, 0.5, 0.9))
    rows = [json.loads(line) for line in (on_nodes / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {"node_accuracy": row["accuracy"], "accuracy": None, "loss": None}
    (on_nodes / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = invoke("list", "--runs-dir", failed.parent).output
    of_run = {line.split()[0]: line for line in output.splitlines() if "digits" in line}
    assert "failed" in of_run["22"]
    assert "90.0 % on nodes" in of_run["11"]
    assert "failed: The run failed." in invoke("show", failed).output
    shown = [line.split() for line in invoke("show", on_nodes).output.splitlines()]
    assert ["accuracy", "90.0", "%", "on", "nodes"] in shown
    assert ["rounds", "to", "80", "%", "2"] in shown


def test_a_run_that_was_stopped_is_listed_as_stopped(finished_run):
    folder = finished_run("22")
    (folder / "summary.json").unlink()
    with (folder / "journal.jsonl").open("a") as journal:
        journal.write(json.dumps({"round": 1, "stopped": True}) + "\n")
    (line,) = [
        line
        for line in invoke("list", "--runs-dir", folder.parent).output.splitlines()
        if line.startswith("22")
    ]
    assert "stopped" in line
    assert "failed" not in line


@pytest.fixture
def kolkata(monkeypatch):
    """The machine's clock is five and a half hours ahead of UTC."""
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_a_runs_start_is_shown_by_the_machines_clock_as_the_queues_times_are(finished_run, kolkata):
    folder = finished_run("22")
    started(folder, "2026-01-01T20:00:00+00:00")
    assert "2026-01-02 01:30" in invoke("list", "--runs-dir", folder.parent).output
    shown = invoke("show", "latest", "--runs-dir", folder.parent)
    assert "started 2026-01-02 01:30" in shown.stderr


def test_a_folder_with_brackets_in_its_name_is_shown(finished_run, tmp_path):
    folder = finished_run("22")
    named = folder.parent.rename(tmp_path / "of [b]")
    result = invoke("show", "22", "--runs-dir", named)
    assert result.exit_code == 0, result.output
    assert "of [b]" in " ".join(result.stdout.split())


def test_a_list_fits_a_terminal_of_80_columns_with_whole_dates(finished_run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    folder = finished_run("16120037219058242387")
    output = invoke("list", "--runs-dir", folder.parent).output
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d ", output)


LONG = f"they.{'of_long_names.' * 4}strategies:TheirStrategyWithALongName_Z"
LONG_ENDS = "they", "_Z"


@pytest.mark.parametrize("command", [["list"], ["show", "22"], ["compare", "22", "11"]])
def test_at_80_columns_a_module_and_class_is_folded_and_not_cut(finished_run, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    folder = finished_run("22")
    finished_run("11")
    file = folder / "settings.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "strategy": LONG, "dataset": LONG}))
    output = invoke(*command, "--runs-dir", folder.parent).output
    assert "…" not in output
    assert all(part in output for part in LONG_ENDS)


def test_a_run_is_shown_with_its_numbers_and_settings(finished_run):
    output = invoke("show", finished_run(train__lr=0.3)).output
    shown = [line.split() for line in output.splitlines()]
    for line in (["accuracy", "90.0", "%"], ["train.lr", "0.3"], ["warnings", "2"]):
        assert line in shown


def test_a_run_is_named_by_its_first_digits_and_never_cut(finished_run, monkeypatch):
    ids = ["16120037219058242387", "16120047219058242387"]
    folders = [finished_run(name) for name in ids]
    runs_dir = folders[0].parent
    monkeypatch.setenv("COLUMNS", "40")
    listed = invoke("list", "--runs-dir", runs_dir).output
    assert all(name[:7] in listed for name in ids)
    assert f"in {runs_dir / ids[1]}" in invoke(
        "show", ids[1][:7], "--runs-dir", runs_dir
    ).output.replace("\n", "")
    assert_refused(invoke("show", "16", "--runs-dir", runs_dir), *ids)
    assert "no run 3 in" in invoke("show", "3", "--runs-dir", runs_dir).stderr


def test_runs_are_compared(finished_run):
    folders = [
        finished_run("1", strategy="fedavg", accuracies=(0.1, 0.6)),
        finished_run("2", strategy="hfldd", accuracies=(0.1, 0.7)),
    ]
    output = invoke("compare", *folders).output
    assert "Cost of 60.0 % accuracy" in output
    assert "70.0 %" in output


@pytest.mark.filterwarnings("ignore:.*torch.jit.load:DeprecationWarning")
def test_export_writes_the_model_and_its_card(finished_run, tmp_path):
    folder = finished_run()
    result = invoke("export", folder, "--format", "torchscript", "--output", tmp_path / "out")
    assert result.output.split() == [
        str(tmp_path / "out" / "model.pt"),
        str(tmp_path / "out" / "model-card.md"),
    ]
    assert torch.jit.load(tmp_path / "out" / "model.pt")(torch.zeros(1, 1, 8, 8)).shape == (1, 10)
    assert "`model.pt`" in (tmp_path / "out" / "model-card.md").read_text()


def test_export_writes_a_student_beside_the_model(finished_run, tmp_path, monkeypatch):
    monkeypatch.setattr("flwr_distill.server.export.student.EPOCHS", 1)
    few = ("--student", "mlp", "--num-samples", "20", "--output", tmp_path)
    result = invoke("export", finished_run(), *few)
    assert str(tmp_path / "student-model.safetensors") in result.output
    assert "it agrees with the model on" in result.output
    assert_refused(
        invoke("export", finished_run("102"), "--student", "no-such", "--output", tmp_path),
        "no-such",
    )


def test_export_of_a_run_without_a_model_is_an_error(finished_run):
    folder = finished_run()
    (folder / "model.safetensors").unlink()
    assert_refused(invoke("export", folder), "model")


def test_latest_is_the_run_that_started_last_whatever_the_times_of_its_files(finished_run):
    older, newer = finished_run("22"), finished_run("11")
    started(older, "2026-01-01T00:00:00+02:00")
    started(newer, "2025-12-31T23:00:00+00:00")  # an hour later
    os.utime(newer / "settings.json", (1, 1))  # as after a copy
    result = invoke("export", "latest", "--runs-dir", older.parent)
    assert str(newer / "export") in result.stdout
    assert "11" in result.stderr
    assert "2025-12-31 23:00" in result.stderr


def test_of_two_runs_in_progress_the_latest_is_said_to_be_one(finished_run):
    first, second = finished_run("22"), finished_run("11")
    started(first, "2026-01-01T00:00:00+00:00")
    for folder in (first, second):
        (folder / "summary.json").unlink()
    result = invoke("export", "latest", "--runs-dir", first.parent)
    assert "latest is run 11" in result.stderr
    assert "killed" in result.stderr


def test_latest_never_takes_an_older_run_because_the_last_has_no_model(finished_run):
    older, newer = finished_run("22"), finished_run("11")
    started(older, "2026-01-01T00:00:00+00:00")
    (newer / "model.safetensors").unlink()
    result = invoke("export", "latest", "--runs-dir", older.parent)
    assert result.exit_code == 1
    assert str(newer) in result.stderr
    (newer / "settings.json").unlink()  # it waits for its nodes
    (newer / "about.json").unlink()
    assert_refused(invoke("export", "latest", "--runs-dir", older.parent), "run 11")
    assert not (older / "export").exists()


def test_a_run_of_the_runs_dir_goes_before_a_folder_of_the_same_name(finished_run, monkeypatch):
    meant, other = finished_run("22"), finished_run("33")
    (meant.parent / "elsewhere").mkdir()
    other.rename(meant.parent / "elsewhere" / "22")
    monkeypatch.chdir(meant.parent / "elsewhere")
    assert f"in {meant}" in invoke("show", "22", "--runs-dir", meant.parent).output.replace(
        "\n", ""
    )


def test_an_export_that_cannot_be_written_is_one_line(finished_run, tmp_path):
    (tmp_path / "out").write_text("a file")
    assert_refused(
        invoke("export", finished_run(), "--output", tmp_path / "out" / "model"),
        str(tmp_path / "out"),
    )


def test_a_damaged_file_of_a_run_is_named(finished_run):
    folder = finished_run()
    (folder / "metrics.jsonl").write_bytes(b"\xff\n")
    assert_refused(invoke("show", folder), str(folder / "metrics.jsonl"))


def report(*arguments):
    return command("report", *arguments)


RESULT = {
    **{"strategy": "hfldd", "accuracy": 0.9, "rounds": 3, "server_bytes": 1, "link_bytes": 2},
    "seconds": 3.0,
}


def results(width=120, **runs):
    console = Console(file=io.StringIO(), width=width)
    console.print(results_table("Runs", runs))
    return console.file.getvalue()


def test_results_have_each_warning_once_and_accuracies_of_the_model_or_on_nodes():
    warned = {**RESULT, "warnings": ["No node holds class 8 [of the test set]"]}
    own_models = {**RESULT, "accuracy": None, "node_accuracy": 0.875}
    text = results(old=RESULT, a=warned, b=warned, fedproto=own_models)
    assert text.count("No node holds class 8 [of the test set]") == 1
    assert "87.5 % on nodes" in text
    assert "90.0 % " in text


def test_at_80_columns_the_strategys_module_and_class_is_folded_and_not_cut():
    text = results(80, **{LONG: RESULT})
    assert "…" not in text
    rows = [line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│")]
    assert "".join(rows) == LONG


def test_a_run_is_found_by_folder_by_id_and_as_the_latest(finished_run):
    folder = finished_run("11")
    page = folder / "report.html"
    written = page.read_text()
    for name in (folder, "11", "latest"):
        page.unlink()
        result = report(name, "--runs-dir", folder.parent)
        assert result.exit_code == 0, result.output
        assert result.stdout.strip() == str(page)
        assert page.read_text() == written


def test_several_runs_are_compared_in_one_page(finished_run, tmp_path):
    folders = [finished_run("1", strategy="fedavg"), finished_run("2", strategy="hfldd")]
    assert report(*folders).output.strip() == str(folders[0].parent / "comparison.html")
    assert report(*folders, "--output", tmp_path / "both.html").exit_code == 0
    page = (tmp_path / "both.html").read_text()
    assert "<title>fedavg · hfldd</title>" in page
    assert "Settings that differ" in page


def test_an_unknown_run_is_an_error_with_the_remedy(tmp_path):
    assert_refused(report("nope", "--runs-dir", tmp_path), "no run nope in ", "runs list")
    assert_refused(invoke("list", "--runs-dir", tmp_path), "no runs in")
