"""Metrics besides accuracy in what a run leaves: rows, journal, report, TensorBoard, card."""

import json
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, RecordDict
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flwr_distill.protocol.counts import COUNTS
from flwr_distill.server.app import main
from flwr_distill.server.export.card import model_card
from flwr_distill.server.page.numbers import best, numbers
from flwr_distill.server.page.run_files import read_run
from flwr_distill.server.page.run_page import run_page
from flwr_distill.server.record.checkpoint import checkpoints
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.scores import Counts, scores
from tests.errors import at

KEYS = ("balanced_accuracy", "macro_f1", "auroc", "ece")
CONFIG = {
    "strategy": "fedavg",
    "num-rounds": 2,
    "min-nodes": 3,
    "partition.scheme": "dirichlet",
    "train.local-epochs": 1,
    "train.holdout": 0.3,
    "fraction-evaluate": 1.0,
    "evaluate.counts": True,
}


def run(client_grid, folder, hook=None, **settings):
    config = {**CONFIG, "runs-dir": str(folder), **settings}
    grid = client_grid(3, config)
    if hook:
        ask = grid.pull_messages
        grid.pull_messages = lambda ids: [hook(reply) for reply in ask(ids)]
    main(grid, Context(1, 1, {}, RecordDict(), config))
    return read_run(folder / "1")


def warnings(found):
    return [entry["warning"] for entry in found.journal if "warning" in entry]


def test_rows_journal_report_tensorboard_and_card_have_the_metrics(client_grid, tmp_path):
    found = run(client_grid, tmp_path, **{"most-samples": 0.0})  # all count as they are
    last = found.rows[-1]
    matrix = np.array(last["confusion"])
    assert last["accuracy"] == matrix.trace() / matrix.sum()
    own = scores(Counts.of_confusion(matrix))
    for row in found.rows:
        assert all(0 <= row[key] <= 1 for key in KEYS)
        for key, (low, high) in row["intervals"].items():
            assert low <= high, key
    assert last["balanced_accuracy"] == own["balanced_accuracy"]
    assert last["macro_f1"] == own["macro_f1"]

    nodes = last["node_scores"]
    evaluated = [e["nodes"] for e in found.journal if e.get("phase") == "evaluate"][-1]
    assert nodes["nodes"] == 3
    assert nodes["samples"] == sum(n["num-examples"] for n in evaluated.values())
    right = sum(n["num-examples"] * n["eval-accuracy"] for n in evaluated.values())
    assert nodes["accuracy"] == pytest.approx(right / nodes["samples"])
    scored = [entry for entry in found.journal if "scored" in entry]
    assert [entry["round"] for entry in scored] == [1, 2]
    for own in scored[-1]["nodes"].values():
        assert own["eval-macro-f1-low"] <= own["eval-macro-f1"] <= own["eval-macro-f1-high"]
    assert not any("confusion" in own for own in scored[-1]["nodes"].values())

    page = run_page(found)
    assert page.count("Confusion matrix") == 2
    assert "Beyond accuracy" in page
    assert f"{100 * last['auroc']:.1f} % [" in page
    assert all(name in page for name in found.names.values())
    card = model_card(found, "model.safetensors")
    assert f"macro F1 {100 * last['macro_f1']:.1f} %" in card
    count = f"samples that 3 nodes held out ({nodes['samples']} count), with 95 % intervals"
    assert count in card
    events = EventAccumulator(str(tmp_path / "1"))
    events.Reload()
    tags = events.Tags()
    assert {"balanced_accuracy", "interval/auroc_low", "nodes/auroc"} <= {*tags["scalars"]}
    assert {"confusion", "nodes/confusion"} <= {*tags["images"]}
    assert events.Scalars("ece")[-1].value == pytest.approx(last["ece"])


def test_by_default_the_servers_metrics_are_there_and_nodes_send_no_counts(client_grid, tmp_path):
    replies = []
    found = run(
        client_grid, tmp_path, lambda r: replies.append(r) or r, **{"evaluate.counts": False}
    )
    assert all(COUNTS not in reply.content for reply in replies if reply.has_content())
    assert all(found.rows[-1][key] is not None for key in KEYS)
    assert found.rows[-1]["node_scores"] is None
    assert not any("scored" in entry for entry in found.journal)


def counts_changed(change):
    """Changes the counts of the first node that sends some."""
    first = []

    def changed(reply):
        record = reply.content.config_records.get(COUNTS) if reply.has_content() else None
        if record is not None:
            first.append(reply.metadata.src_node_id)
            if reply.metadata.src_node_id == first[0]:
                change(reply.content)
        return reply

    return changed


def add(key, place, by):
    def change(content):
        values = list(content[COUNTS][key])
        values[place] += by
        content[COUNTS][key] = values

    return change


def drop_samples(content):
    """Counts of one sample alone."""
    content[COUNTS] = ConfigRecord({"confusion": [1] + [0] * 99})


def withhold(content):
    content[COUNTS] = ConfigRecord({"withheld": "policy"})


def drop(content):
    del content[COUNTS]


@pytest.mark.parametrize(
    ("change", "word", "keeps_accuracy"),
    [
        (add("confusion", 3, 1), "rejected: histograms do not add up", True),
        (add("own", 3, 10**13), "rejected: histograms do not add up", True),
        (add("calibration", 3, 1), "rejected: calibration bins do not add up", True),
        (lambda content: content[COUNTS].pop("own"), "rejected: histograms are not of 10", True),
        (drop_samples, "rejected: they are of 1 samples, and the reply of", True),
        (withhold, "counts: never", True),
        (drop, "its reply has none", True),
        (add("confusion", 3, -(10**6)), "confusion", False),
        (add("own", 3, 10**18), "own", False),
        (lambda content: content[COUNTS].update({"own": [0] * 10_000}), "own", False),
        (lambda content: content[COUNTS].update({"own": [0.5]}), "own", False),
        (lambda content: content[COUNTS].update({"own": "x"}), "own", False),
        (lambda content: content[COUNTS].update({"withheld": "a free text"}), "withheld", False),
        (lambda content: content[COUNTS].update({"more": 1}), "more", False),
    ],
)
def test_counts_that_are_wrong_are_refused_with_a_reason_and_the_run_continues(
    change, word, keeps_accuracy, client_grid, tmp_path
):
    found = run(client_grid, tmp_path, counts_changed(change), **{"num-rounds": 1})
    nodes = found.rows[-1]["node_scores"]
    assert nodes["nodes"] == 2
    assert nodes["samples"] < 1000
    assert any(word in text for text in warnings(found)), warnings(found)
    evaluated = [e for e in found.journal if e.get("phase") == "evaluate"][-1]["nodes"]
    assert len(evaluated) == 2 + keeps_accuracy


def test_a_node_without_counts_is_named_once(client_grid, tmp_path):
    def without(reply):
        if reply.has_content() and COUNTS in reply.content:
            withhold(reply.content)
        return reply

    found = run(client_grid, tmp_path, without)
    assert found.rows[-1]["node_scores"] is None
    assert found.rows[-1]["node_accuracy"] is not None
    assert sum("No counts of 3 nodes" in text for text in warnings(found)) == 1


def test_a_private_run_without_noise_on_counts_says_so_and_has_accuracy(client_grid, tmp_path):
    found = run(client_grid, tmp_path, **{"train.dp-noise": 0.5, "num-rounds": 1})
    assert found.rows[-1]["node_scores"] is None
    assert found.rows[-1]["node_accuracy"] is not None
    assert any("differential privacy" in text for text in warnings(found))


def test_a_method_with_evaluations_of_its_own_says_that_they_have_no_counts(client_grid, tmp_path):
    found = run(client_grid, tmp_path, **{"strategy": "fedproto", "num-rounds": 1})
    assert found.rows[-1]["node_accuracy"] is not None
    assert any("by messages of its own" in text for text in warnings(found))


def test_the_best_round_is_by_the_metric_that_the_settings_name(client_grid, tmp_path):
    found = run(client_grid, tmp_path, **{"best-metric": "ece", "num-rounds": 4})
    peak = min(found.rows, key=lambda row: row["ece"])
    assert best(found.rows, "ece") == peak
    kept = checkpoints(tmp_path / "1")
    assert peak["round"] in kept
    assert ("best calibration error", f"{peak['ece']:.3f}, round {peak['round']}") in numbers(found)
    assert f"By calibration error (best-metric) round {peak['round']} is best" in run_page(found)
    assert f"Best by calibration error: round {peak['round']}" in model_card(found, "model")


ROWS = [
    {"round": 0, "accuracy": 0.5, "loss": 2.0, "auroc": 0.7},
    {"round": 1, "accuracy": 0.9, "loss": float("nan"), "auroc": None},
    {"round": 2, "accuracy": 0.8, "loss": 1.0, "auroc": 0.9},
    {"round": 3, "accuracy": 0.8, "loss": 1.0, "auroc": 0.9},
]


@pytest.mark.parametrize(("metric", "number"), [("accuracy", 1), ("loss", 2), ("auroc", 2)])
def test_the_first_of_the_best_rounds_counts_and_smaller_loss_is_better(metric, number):
    assert best(ROWS, metric)["round"] == number


def test_without_test_samples_nodes_counts_say_which_round_is_best():
    rows = [
        {"round": number, "accuracy": None, "loss": None, "node_scores": {"macro_f1": score}}
        for number, score in enumerate((0.2, 0.6, 0.4))
    ]
    assert best(rows, "macro-f1")["round"] == 1
    assert best(rows, "loss") is None


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"fraction-evaluate": 0.0}, "evaluate.counts"),
        ({"strategy": "fedproto", "best-metric": "auroc"}, "best-metric"),
        ({"train.class-weights": "1,2"}, "train.class-weights"),
    ],
)
def test_what_no_run_can_give_is_refused_before_any_node_trains(
    settings, where, client_grid, tmp_path
):
    with pytest.raises(SettingsError) as error:
        run(client_grid, tmp_path, **settings)
    assert at(where)(error.value)
    assert not list(Path(tmp_path).glob("1/metrics.jsonl"))


def test_a_resumed_run_has_the_same_metrics_and_keeps_the_best_by_its_metric(client_grid, tmp_path):
    whole = run(client_grid, tmp_path / "whole", **{"best-metric": "auroc"})
    run(client_grid, tmp_path / "a", **{"best-metric": "auroc", "num-rounds": 1})
    with pytest.raises(Exception, match="best-metric"):
        run(client_grid, tmp_path / "a", **{"resume": "1", "best-metric": "ece"})
    resumed = run(client_grid, tmp_path / "a", **{"best-metric": "auroc", "resume": "1"})
    for row, other in zip(whole.rows, resumed.rows, strict=True):
        for key in (*KEYS, "intervals", "confusion", "node_scores"):
            assert json.dumps(row[key]) == json.dumps(other[key]), (row["round"], key)
