"""The example: a method with a setting, a phase, a handler, a loss term and a panel of its own."""

import hashlib
import importlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from flwr_distill.fleet.local_federation import LocalFederation
from flwr_distill.strategies.common.registry import find_strategy
from flwr_distill.task.errors import SettingsError

ROOT = Path(__file__).resolve().parents[2]
SURVEY = "query.class_means"
RECORD = "class-anchors"


@pytest.fixture
def anchors(example):
    """The example's modules."""
    return {
        name: importlib.import_module(f"class_anchors.{name}")
        for name in ("method", "strategy", "client")
    }


def model_of(folder):
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_its_phase_handler_setting_loss_term_and_panel_all_take_part(
    anchors, run, sent, rows, monkeypatch
):
    values, term = [], anchors["client"].Anchored
    original = term.__call__

    def counted(*arguments):
        value = original(*arguments)
        values.append(value.item())
        return value

    monkeypatch.setattr(term, "__call__", counted)
    folder = run(strategy="class-anchors", strategy_args={"weight": 0.5, "every": 2})
    assert [row["round"] for row in rows(folder)] == [0, 1, 2]
    assert len(sent(SURVEY)) == 3, "asked before round 1, and not before round 2"
    records = [message.content.array_records[RECORD] for message in sent("train")]
    assert len(records) == 6
    pull = records[0]["pull"].numpy()
    assert set(pull) <= {0.0, np.float32(0.5)}
    assert (pull > 0).any()
    assert values, "the loss term was called"
    assert all(value > 0 for value in values)
    page = (folder / "report.html").read_text()
    assert "Class anchors" in page
    assert "classes with at least 5" in page
    assert "nodes report their class means" in page
    plain = run(strategy="fedavg", run_id=8)
    assert model_of(plain) != model_of(folder)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"weight": -1.0}, "weight = -1.0"),
        ({"every": 0}, "every = 0"),
        ({"fewest": "many"}, "fewest = 'many'"),
        ({"wieght": 1.0}, "wieght"),
    ],
)
def test_a_wrong_setting_is_refused_by_name_before_any_node_is_asked(example, run, arguments, said):
    with pytest.raises(SettingsError, match="strategy-args") as caught:
        run(strategy="class-anchors", strategy_args=arguments)
    assert said in str(caught.value)
    assert run.grid.pushed == []


def test_the_report_tells_what_left_nodes_by_the_settings_of_the_run(example, run):
    folder = run(strategy="class-anchors", strategy_args={"fewest": 9})
    assert "classes with at least 9" in (folder / "report.html").read_text()


def test_a_resumed_run_goes_on_with_its_anchors_and_ends_with_the_same_model(example, run, sent):
    setting = {"strategy": "class-anchors", "strategy_args": {"every": 5}}
    whole = run(run_id=1, num_rounds=3, **setting)
    half = run(run_id=2, num_rounds=1, **setting)
    resumed = run(run_id=3, num_rounds=3, resume="2", **setting)
    assert resumed == half
    assert sent(SURVEY) == []
    assert model_of(resumed) == model_of(whole)


def test_differential_privacy_is_refused_at_the_server_and_on_nodes(example, run):
    with pytest.raises(SettingsError, match="class means and counts without noise"):
        run(strategy="class-anchors", train__dp_noise=1.0)
    assert run.grid.pushed == []
    folder = run(strategy="fedavg", train__dp_noise=1.0, run_id=9)
    arrays = sent_model(run.grid)
    node = next(iter(run.grid.nodes.values()))
    survey = RecordDict({"arrays": arrays, "config": ConfigRecord({"fewest": 1})})
    with pytest.raises(SettingsError, match="survey of class means"):
        node(Message(survey, 1, SURVEY))
    assert folder.exists()


def sent_model(grid):
    return next(m for m in grid.pushed if m.metadata.message_type == "train").content["arrays"]


def test_where_a_node_fails_to_tell_its_means_the_others_give_the_anchors(example, run, sent):
    def fails(node, message):
        return node == 0 and message.metadata.message_type == SURVEY

    folder = run(strategy="class-anchors", broken=fails, num_rounds=1)
    assert "this node is broken" in (folder / "journal.jsonl").read_text()
    messages = sent("train")
    assert len(messages) == 3
    assert (messages[0].content.array_records[RECORD]["pull"].numpy() > 0).any()


@pytest.mark.parametrize(
    ("means", "counts", "said"),
    [
        (np.zeros((10, 4), np.float32), np.zeros(10, np.int64), None),
        (np.zeros((10, 5), np.float32), np.zeros(10, np.int64), "means are"),
        (np.zeros(10, np.float32), np.zeros(10, np.int64), "means are"),
        (np.full((10, 4), np.nan, np.float32), np.zeros(10, np.int64), "NaN"),
        (np.zeros((10, 4), np.float32), np.full(10, -1), "counts are not numbers"),
        (np.zeros((10, 4), np.float32), np.zeros(10, np.float32), "counts are not numbers"),
        (np.zeros((10, 4), np.float32), np.zeros(9, np.int64), "counts are not numbers"),
        (np.zeros((10, 4), np.float32), None, "it needs means and counts"),
    ],
)
def test_an_answer_that_cannot_be_is_refused_by_its_phase(anchors, means, counts, said):
    arrays = {"means": Array(means)} | ({} if counts is None else {"counts": Array(counts)})
    content = RecordDict(
        {"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-classes": 3})}
    )
    (reply,) = anchors["method"].METHOD.phases[0].replies
    model = {"head.weight": np.zeros((10, 4), np.float32)}
    if said is None:
        reply.check(content, model)
    else:
        with pytest.raises(ValueError, match=said):
            reply.check(content, model)


def test_means_of_rare_classes_are_not_told(anchors):
    features = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    labels = torch.tensor([2, 2, 0])
    means, counts = anchors["client"].class_means(features, labels, num_classes=3, fewest=2)
    assert counts.tolist() == [0, 0, 2]
    assert means.tolist() == [[0.0, 0.0], [0.0, 0.0], [2.0, 3.0]]


def test_anchors_are_means_over_samples_and_a_class_nobody_told_of_pulls_at_nothing(anchors):
    told = [
        {"means": np.array([[1.0], [0.0]]), "counts": np.array([3, 0])},
        {"means": np.array([[5.0], [0.0]]), "counts": np.array([1, 0])},
    ]
    made = anchors["strategy"].mean_anchors(told, weight=0.5)
    assert made["means"].tolist() == [[2.0], [0.0]]
    assert made["pull"].tolist() == [0.5, 0.0]


def test_a_node_without_the_package_takes_no_part_and_is_told_what_to_install(run, sent):
    """Here no package is installed at all: the strategy stands in for that of another machine."""
    from flwr.app import Context

    from flwr_distill.client.app import app

    context = Context(1, 1, {"partition-id": 0, "num-partitions": 2}, RecordDict(), {})
    required = ConfigRecord({"method": "class-anchors", "package": "class-anchors==0.1.0"})
    message = Message(RecordDict({"config": required}), 1, "query.describe")
    message.metadata.__dict__["_message_id"] = "1"
    (reason,) = app(message, context).content["config"]["missing"]
    assert "pip install 'class-anchors==0.1.0'" in reason
    with pytest.raises(SettingsError, match=r"no handler of query\.class_means is installed"):
        app(Message(RecordDict(), 1, SURVEY), context)
    record = ArrayRecord({"means": Array(np.zeros((10, 4)))})
    content = RecordDict({"arrays": record, RECORD: record})
    with pytest.raises(SettingsError, match="no loss term of record 'class-anchors' is installed"):
        app(Message(content, 1, "train"), context)


def test_without_the_package_the_server_says_which_methods_there_are():
    with pytest.raises(SettingsError, match="not one of agreement, analytic, auto"):
        find_strategy("class-anchors")


@pytest.mark.slow
def test_in_real_processes_a_node_that_lacks_the_package_says_so_and_takes_part_once_it_is_there(
    example_site, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", str(example_site))
    federation = LocalFederation(3, tmp_path / "state")
    missing = federation.nodes[2]
    start = missing.start

    def start_without():
        path = federation.env["PYTHONPATH"]
        federation.env["PYTHONPATH"] = str(tmp_path / "site")
        start()
        federation.env["PYTHONPATH"] = path

    run_config = {
        "strategy": "class-anchors",
        "strategy-args": json.dumps({"weight": 0.5}),
        "num-rounds": 1,
        "min-nodes": 2,
        "train.local-epochs": 1,
        "runs-dir": str(tmp_path / "runs"),
        "phase-timeout": 180.0,
    }
    (tmp_path / "site").mkdir()
    monkeypatch.setattr(missing, "start", start_without)
    # What a nursery forks has the nursery's packages; these nodes are as on machines of their own.
    monkeypatch.setattr(federation, "_start_nurseries", lambda: None)
    with federation:
        without = federation.run(ROOT, run_config)
        shutil.copytree(example_site, tmp_path / "site", dirs_exist_ok=True)
        complete = federation.run(ROOT, run_config)
    text = "\n".join(without.lines)
    assert "pip install 'class-anchors==0.1.0' where the node runs" in text
    for outcome, num_nodes in ((without, 2), (complete, 3)):
        assert outcome.completed, "\n".join(outcome.lines)
        folder = tmp_path / "runs" / str(outcome.run_id)
        entries = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
        took_part = {
            phase: [len(entry["nodes"]) for entry in entries if entry.get("phase") == phase]
            for phase in (SURVEY, "train")
        }
        assert took_part == {SURVEY: [num_nodes], "train": [num_nodes]}, "\n".join(outcome.lines)
        assert "Class anchors" in (folder / "report.html").read_text()
