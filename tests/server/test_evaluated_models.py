"""A run that evaluates a model on its nodes, once and without training."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from flwr.app import MetricRecord, RecordDict
from PIL import Image
from safetensors.torch import load_file, save_file

from benchmarks.in_process import run_in_process
from flwr_distill.server.export.evaluated import EvaluatedModelError, read_evaluated
from flwr_distill.server.export.model import ExportError, export_model, write_model
from flwr_distill.server.page.by_node import by_node
from flwr_distill.server.page.run_files import read_run
from flwr_distill.server.page.run_page import run_page
from flwr_distill.server.record.checkpoint import checkpoints, load_checkpoint
from flwr_distill.server.rounds import NothingLearntError
from flwr_distill.strategies.common.waiting import TooFewNodesError
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.models import create_model
from tests.server.run_folder import journal, rows

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.load:DeprecationWarning")

EVALUATION = {"num-rounds": 0, "fraction-evaluate": 1.0, "evaluate.counts": True}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run that trained, and evaluated its model on nodes."""
    runs = tmp_path_factory.mktemp("trained")
    config = {**EVALUATION, "strategy": "fedavg", "num-rounds": 1, "seed": 3}
    run_in_process(config, [{"num-partitions": 3}] * 3, runs)
    return runs / "1"


@pytest.fixture
def evaluate(play, tmp_path):
    """Evaluate a model with the settings that it names itself; gives the run's folder."""

    def run(path, **more):
        config = {**read_evaluated(path).settings(), **EVALUATION, "evaluate.model": str(path)}
        return play(config, runs_dir=str(tmp_path / "evaluated"), **more)

    return run


def sent(grid):
    return {message.metadata.message_type for message in grid.pushed}


def scores(folder):
    """Metrics of all nodes together, by counts."""
    found = rows(folder)[-1]["node_scores"]
    return {key: found[key] for key in ("samples", "accuracy", "auroc", "confusion")}


def test_a_run_is_evaluated_on_the_samples_that_its_nodes_held_out_and_nothing_trains(
    trained, evaluate, play
):
    folder = evaluate(trained)
    assert scores(folder) == scores(trained)
    assert rows(folder)[-1]["accuracy"] == rows(trained)[-1]["accuracy"]
    assert [row["round"] for row in rows(folder)] == [0]
    assert sent(play.grid) == {"query.describe", "evaluate"}
    assert not (folder / "model.safetensors").exists()  # a card of this run would say nothing true
    with pytest.raises(ExportError, check=lambda error: str(trained) in error.remedy):
        evaluate(folder, run_id=2)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, ""),
        ({"nodes": 2}, "node-0 and node-1 had other data"),
        ({"seed": 4}, "seed was 3"),
        ({"train__holdout": 0.3}, "train.holdout was 0.1"),
        ({"partition__alpha": 0.7, "partition__scheme": "dirichlet"}, "partition.scheme was"),
    ],
)
def test_samples_that_may_have_been_in_training_are_a_warning(
    trained, evaluate, changed, words, caplog
):
    folder = evaluate(trained, **changed)
    assert ("may have been in its training" in caplog.text) == bool(words)
    assert words in caplog.text
    assert words in run_page(read_run(folder))


@pytest.mark.parametrize("form", ["safetensors", "onnx", "torchscript"])
def test_an_exported_model_is_the_same_in_each_format(trained, evaluate, form, tmp_path):
    file = export_model(read_run(trained), form, tmp_path)
    assert scores(evaluate(file, seed=3)) == scores(trained)


def test_a_file_of_weights_alone_has_the_architecture_that_the_settings_name(trained, evaluate):
    file = trained / "model.safetensors"
    assert scores(evaluate(file, seed=3)) == scores(trained)
    with pytest.raises(EvaluatedModelError, match="weights", check=where(file)):
        evaluate(file, model="mlp")


def where(file):
    return partial(lambda error: error.where == "evaluate.model" and error.value == str(file))


def spoilt(change):
    def write(source, target):
        weights = load_file(source)
        change(weights)
        save_file(weights, target)

    return write


def _nan(weights):
    next(iter(weights.values()))[0] = torch.nan


def _cut(weights):
    name = next(iter(weights))
    weights[name] = weights[name][:1].contiguous()


def _whole(weights):
    for name, array in weights.items():
        weights[name] = array.long()


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (spoilt(_nan), "NaN"),
        (spoilt(_cut), "shape"),
        (spoilt(_whole), "is of torch.int64"),
        (spoilt(lambda weights: weights.popitem()), "has no weights"),
        (spoilt(lambda weights: weights.update(more=torch.zeros(1))), "more"),
        (lambda source, target: target.write_bytes(b"hostile"), "not a model"),
        (lambda source, target: None, "no such file"),
    ],
)
def test_a_model_that_does_not_fit_ends_the_run_before_a_node_is_asked(
    trained, play, tmp_path, write, problem
):
    file = tmp_path / "other.safetensors"
    write(trained / "model.safetensors", file)
    with pytest.raises(EvaluatedModelError, match=problem, check=where(file)):
        play(EVALUATION, evaluate__model=str(file), runs_dir=str(tmp_path / "evaluated"))
    assert not play.grid.pushed


def test_weights_that_the_exporter_has_folded_are_refused(tmp_path, trained):
    run = read_run(trained)
    description = read_evaluated(export_model(run, "safetensors", tmp_path)).description
    shape = (3, 32, 32)
    other = type(description)("resnet8", type(description.spec)("x", shape, 10, *[(0.5,) * 3] * 2))
    weights = create_model("resnet8", other.spec, seed=0).state_dict()
    file = write_model(weights, other, "onnx", tmp_path / "resnet8.onnx")
    with pytest.raises(EvaluatedModelError, match="folded", check=where(file)):
        read_evaluated(file)


def test_classes_of_other_names_are_refused(evaluate, tmp_path, trained):
    file = export_model(read_run(trained), "safetensors", tmp_path)
    names = ",".join("zabcdefghi")
    with pytest.raises(EvaluatedModelError, match="classes differ", check=where(file)):
        evaluate(file, dataset="private", private__shape="1x8x8", private__classes=names)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"num-rounds": 2}, "num-rounds"),
        ({"num-rounds": 0, "strategy": "hfldd"}, "strategy"),
        ({"num-rounds": 0, "fraction-evaluate": 0.5}, "fraction-evaluate"),
        ({"num-rounds": 0, "start": "analytic"}, "start"),
    ],
)
def test_an_evaluation_is_nothing_else(play, trained, settings, key):
    given = {**EVALUATION, "evaluate.model": str(trained), "seed": 3, **settings}
    with pytest.raises(SettingsError, check=lambda error: error.where == key):
        play(given)


def test_without_a_model_a_run_has_rounds(play):
    with pytest.raises(SettingsError, check=lambda error: error.where == "num-rounds"):
        play(num_rounds=0)


def test_nodes_without_counts_are_in_the_table_and_a_silent_one_is_a_fault(trained, evaluate):
    folder = evaluate(
        trained,
        evaluate__counts=False,
        broken=lambda node, message: node == 1 and message.metadata.message_type == "evaluate",
    )
    (table,) = by_node(read_run(folder)).tables
    assert table.columns == ["node", "#samples", "#accuracy"]
    assert sorted(row[0] for row in table.rows) == ["node-0", "node-2"]
    noisy = {"eval-balanced-accuracy": 0.5, "eval-balanced-accuracy-low": 0.4}
    noisy["eval-balanced-accuracy-high"] = 0.6  # of a confusion matrix alone
    (node, *_) = journal(folder, "phase")[-1]["nodes"]
    line = {"round": 0, "scored": "evaluate", "nodes": {node: noisy}}
    with (folder / "journal.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    (table,) = by_node(read_run(folder)).tables
    assert table.columns[2:] == ["#accuracy", "#balanced accuracy"]
    assert sorted(row[3] for row in table.rows) == ["-", "50.0 % [40.0, 60.0]"]
    assert any("this node is broken" in entry["warning"] for entry in journal(folder, "warning"))


def test_a_model_that_no_node_evaluates_ends_the_run_with_their_reasons(trained, evaluate):
    with pytest.raises(NothingLearntError, match="this node is broken"):
        evaluate(trained, broken=lambda node, message: message.metadata.message_type == "evaluate")


def test_what_no_accuracy_can_be_is_rejected_and_a_huge_claim_moves_nobody_else(
    trained, evaluate, client_grid
):
    def known(folder):
        return [row[:3] for row in by_node(read_run(folder)).tables[0].rows]

    honest = known(evaluate(trained))

    def lying(accuracy):
        grid = client_grid(3, {**read_evaluated(trained).settings(), **EVALUATION})
        node = next(iter(grid.nodes))
        answer = grid.nodes[node]

        def lie(message):
            content = answer(message)
            if message.metadata.message_type == "evaluate":
                claim = {"num-examples": 10**14, "eval-accuracy": accuracy, "eval-loss": 0.0}
                content = RecordDict({"metrics": MetricRecord(claim)})
            return content

        grid.nodes[node] = lie
        return grid

    others = [row for row in honest if row[0] != "node-0"]
    assert known(evaluate(trained, run_id=2, grid=lying(7.0))) == others
    first, *rest = known(evaluate(trained, run_id=3, grid=lying(0.0)))
    assert first == ["node-0", f"{10**14:,}", "0.0 % [0.0, 0.0]"]
    assert rest == others


def test_a_frozen_network_is_that_of_training_or_no_node_takes_part(tmp_path, play):
    config = {"strategy": "analytic", "model": "random-features", "num-rounds": 1, "seed": 3}
    nodes = [{"num-partitions": 2}] * 2
    (*_, row) = run_in_process({**config, "fraction-evaluate": 1.0}, nodes, tmp_path / "trained")
    path = tmp_path / "trained" / "1"
    given = {**read_evaluated(path).settings(), **EVALUATION, "evaluate.model": str(path)}
    runs = {"nodes": 2, "runs_dir": str(tmp_path / "evaluated")}
    assert rows(play(given, **runs))[0]["node_accuracy"] == row["node_accuracy"]
    with pytest.raises(TooFewNodesError, match="frozen network"):
        play(given, **runs, run_id=2, seed=4)


def test_the_page_names_the_model_and_the_worst_node_and_has_no_curves(trained, evaluate):
    run = read_run(evaluate(trained))
    page, section = run_page(run), by_node(run)
    lowest = min(
        journal(run.folder, "phase")[-1]["nodes"].items(), key=lambda pair: pair[1]["eval-accuracy"]
    )
    assert section.tables[0].rows[0][0] == run.name(lowest[0])
    assert section.text[0].startswith(f"Worst is {run.name(lowest[0])}: ")
    assert section.text[0] in page.replace("&#39;", "'")
    assert run.title == f"{trained.name}, evaluated on digits"
    assert "<h2>Learning</h2>" not in page


def test_the_evaluated_model_is_that_of_the_run_bit_by_bit(trained, evaluate):
    before = load_checkpoint(checkpoints(trained)[1]).arrays
    after = load_checkpoint(checkpoints(evaluate(trained))[0]).arrays
    assert all(np.array_equal(before[name].numpy(), after[name].numpy()) for name in before)


def write_ward(folder, name, centre):
    """A table of patients who are ill if they are old."""
    ages = np.random.default_rng(centre).normal(centre, 12, 60)
    lines = [f"{age:.1f},{'fm'[i % 2]},{'yes' if age > 60 else 'no'}" for i, age in enumerate(ages)]
    path = folder / f"{name}.csv"
    path.write_text("\n".join(["age,sex,ill", *lines]) + "\n")
    return {"data": str(path), "name": name}


def test_tables_are_standardised_as_in_training_whatever_nodes_have_now(tmp_path):
    """The run left its columns to the nodes, which are others in the evaluation."""
    columns = {"private.columns": "age,sex:f|m", "private.classes": "no,yes"}
    config = {"strategy": "fedavg", "dataset": "private", "private.label": "ill", **columns}
    wards = [write_ward(tmp_path, "a", 50), write_ward(tmp_path, "b", 70)]
    run_in_process({**config, **EVALUATION, "num-rounds": 1}, wards, tmp_path / "trained")
    spec = read_run(tmp_path / "trained" / "1").about["spec"]
    for path in (
        tmp_path / "trained" / "1",
        export_model(read_run(tmp_path / "trained" / "1"), "onnx", tmp_path),
    ):
        given = {"private.label": "ill", **read_evaluated(path).settings()}
        assert given["private.columns"] != columns["private.columns"]
        one = {**given, **EVALUATION, "strategy": "fedavg", "evaluate.model": str(path)}
        runs = tmp_path / f"evaluated-{path.name}"
        (row,) = run_in_process(one, wards[:1], runs)
        assert read_run(runs / "1").about["spec"] == spec
        assert row["node_scores"]["nodes"] == 1


def test_classes_that_nodes_named_in_training_are_the_models(tmp_path, play):
    own = tmp_path / "own"
    for label in ("cat", "dog"):
        (own / label).mkdir(parents=True)
        for number in range(10):
            pixels = np.full((8, 8), 20 * number, np.uint8)
            Image.fromarray(pixels).save(own / label / f"{number}.png")
    config = {"strategy": "fedavg", "dataset": "private", "private.shape": "1x8x8"}
    nodes = [{"data": str(own)}] * 2
    classes = {"private.num-classes": 2, "num-rounds": 1}
    run_in_process({**config, **EVALUATION, **classes}, nodes, tmp_path / "trained")
    known = read_evaluated(tmp_path / "trained" / "1").settings()
    assert known["private.classes"] == "cat,dog"
    assert known["private.shape"] == "1x8x8"
