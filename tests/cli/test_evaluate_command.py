"""`flwr-distill evaluate`: what it submits, what it shows, and what nodes' policies let out."""

import json
import shutil

import pytest
from safetensors.torch import save_file

import flwr_distill.cli.run
from flwr_distill.fleet.submission import RunOutcome
from flwr_distill.server.export.model import export_model
from flwr_distill.server.page.run_files import read_run
from flwr_distill.task.models import create_model
from flwr_distill.task.settings import TaskSettings
from flwr_distill.task.source import data_spec
from tests.server.run_folder import journal

from .commands import assert_refused, command


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    """Run the command with a run that completes; `submitted` has the settings of each."""
    submitted = []

    def submit(app_dir, run_config, *, control, on_line):
        submitted.append(run_config)
        on_line("started run 7")
        on_line(f"Results in {invoke.results}")
        return RunOutcome(7, "finished:completed", [], "")

    def invoke(*arguments):
        return command("evaluate", *arguments, "--superlink", "localhost:1", "--insecure")

    monkeypatch.setattr(flwr_distill.cli.run, "submit", submit)
    monkeypatch.chdir(tmp_path)
    invoke.submitted, invoke.results = submitted, "/elsewhere/7"
    return invoke


def test_a_run_is_evaluated_with_its_own_data_and_model_and_what_is_given_counts(
    invoke, finished_run
):
    run = finished_run(seed=5, partition__alpha=0.3, partition__scheme="dirichlet")
    result = invoke(run, "-c", "evaluate.counts=false seed=6")
    assert result.exit_code == 0, result.output
    assert invoke.submitted == [
        {
            "strategy": "fedavg",
            "num-rounds": 0,
            "fraction-evaluate": 1.0,
            "evaluate.counts": False,
            "evaluate.model": str(run),
            "partition.scheme": "dirichlet",
            "partition.alpha": 0.3,
            "seed": 6,
        }
    ]
    assert "with the server, in /elsewhere/7" in result.stdout


def test_a_file_says_its_model_and_a_run_is_found_by_its_first_digits(
    invoke, finished_run, tmp_path
):
    run = finished_run()
    file = export_model(read_run(run), "safetensors", tmp_path / "out")
    assert invoke(file).exit_code == 0
    assert invoke("10", "--runs-dir", run.parent).exit_code == 0
    of_file, of_run = invoke.submitted
    assert (of_file["dataset"], of_file["model"]) == ("digits", "digits-cnn")
    assert of_file["evaluate.model"] == str(file)
    assert of_run["evaluate.model"] == str(run)


def test_help_says_what_an_argument_may_be(invoke):
    assert ".safetensors" in command("evaluate", "--help").stdout


def test_the_latest_run_is_the_latest_that_trained(invoke, finished_run):
    run = finished_run()
    evaluation = run.parent / "102"
    shutil.copytree(run, evaluation)
    settings = json.loads((run / "settings.json").read_text())
    settings["evaluate"]["model"] = str(run)
    (evaluation / "settings.json").write_text(json.dumps(settings))
    about = json.loads((run / "about.json").read_text()) | {"started": "2999-01-01T00:00:00+00:00"}
    (evaluation / "about.json").write_text(json.dumps(about))
    assert invoke("latest", "--runs-dir", run.parent).exit_code == 0
    assert invoke.submitted[0]["evaluate.model"] == str(run)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("nowhere.onnx",), ["nowhere.onnx"]),
        (("notes.txt",), ["evaluate.model", "notes.txt", ".safetensors"]),
        (("101", "-c", "num-rounds=3"), ["num-rounds = 3"]),
        (("101", "-c", "train.lrr=3"), ["train.lrr"]),
    ],
)
def test_what_cannot_be_evaluated_is_one_line_before_anything_is_submitted(
    invoke, finished_run, tmp_path, given, words
):
    finished_run()
    (tmp_path / "notes.txt").touch()
    assert_refused(invoke(*given), *words)
    assert invoke.submitted == []


def test_the_terminal_has_the_worst_nodes_first_and_not_all_of_very_many(
    invoke, finished_run, tmp_path
):
    run = finished_run()
    results = tmp_path / "runs" / "7"
    shutil.copytree(run, results)
    nodes = {str(n): {"num-examples": 50, "eval-accuracy": n / 1000} for n in range(1000)}
    line = {"round": 0, "phase": "evaluate", "seconds": 1.0, "asked": 1000, "nodes": nodes}
    (results / "journal.jsonl").write_text(json.dumps(line) + "\n")
    invoke.results = results
    result = invoke(run)
    assert result.exit_code == 0, result.output
    shown = [row for row in result.stdout.splitlines() if "│" in row and "%" in row]
    assert len(shown) == 20
    assert shown[0].split("│")[1].strip() == "0"
    assert "Worst is 0: 0.0 % of 50 samples" in result.stdout
    assert f"Report: {results / 'report.html'}" in result.stdout


NOISY = """\
holdout: 0.5
replies: declared
evaluation-epsilon: 1.0
fewest-held-out: 10
most-evaluations: 1
"""


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "is_noisy"), [("", False), (NOISY, True)])
def test_policies_bound_an_evaluation_like_any_release(tmp_path, policy, is_noisy):
    weights = create_model("auto", data_spec(TaskSettings()), seed=0).state_dict()
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "policy.yaml").write_text(f"extends: standard\n{policy}")
    settings = (
        f'evaluate.model="{tmp_path}/model.safetensors" num-rounds=0 strategy="fedavg" '
        "fraction-evaluate=1.0 evaluate.counts=true"
    )
    runs = ("--runs-dir", tmp_path / "runs", "--policy", tmp_path / "policy.yaml")
    options = ("-c", settings, "--nodes", 2, "--workers", 1, *runs)
    result = command("simulate", *options)
    assert result.exit_code == 0, result.output
    (folder,) = tmp_path.glob("runs/[0-9]*")
    (phase,) = [entry for entry in journal(folder, "phase") if entry["phase"] == "evaluate"]
    assert len(phase["nodes"]) == 2
    for numbers in phase["nodes"].values():
        assert ("eval-loss" in numbers) != is_noisy
        assert not is_noisy or numbers["eval-accuracy"] == round(numbers["eval-accuracy"], 2)
    assert journal(folder, "scored") == []
    assert "counts: never" in " ".join(entry["warning"] for entry in journal(folder, "warning"))
    if is_noisy:
        assert_refused(command("simulate", *options), "most-evaluations")
