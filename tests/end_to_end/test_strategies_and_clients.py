"""Whole runs of our ServerApp with our ClientApp in this process; only the wire is in memory."""

import hashlib
import logging
import math

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, MetricRecord, RecordDict

from flwr_distill.client.app import app
from flwr_distill.server.app import main
from flwr_distill.task.datasets import Dataset, DataSpec, RawSamples
from flwr_distill.task.errors import SettingsError

from .conftest import QUICK
from .runs import phases, read, rows


@pytest.mark.pictures
def test_a_run_leaves_metrics_settings_topology_traffic_curve_and_model(run):
    folder = run(strategy="hfldd")
    assert [row["round"] for row in rows(folder)] == [0, 1, 2]
    assert read(folder, "settings")["num-rounds"] == 2
    clusters = read(folder, "topology")["clusters"]
    named = [n for c in clusters for n in (c["head"], *c["members"])]
    assert sorted(named) == ["node-0", "node-1", "node-2", "node-3"]
    traffic, summary = read(folder, "traffic"), read(folder, "summary")
    measured = sum(s for phase in traffic["measured"].values() for s in phase.values())
    assert measured == summary["server_bytes"] + summary["link_bytes"]
    assert set(traffic["formulas"]) == {
        "fedavg (HFLDD, eq. 3)",
        "hfldd (HFLDD, eq. 18)",
        "fedseq (HFLDD, eq. 19)",
    }
    assert (folder / "accuracy.png").read_bytes()[:4] == b"\x89PNG"
    assert (folder / "model.safetensors").stat().st_size > 18_346 * 4


def test_the_log_has_one_line_a_round_with_accuracy_bytes_and_time_left(run, monkeypatch):
    lines = []
    monkeypatch.setattr(
        "flwr_distill.server.record.recorder.log",
        lambda level, text, *args: lines.append(text % args),
    )
    run(strategy="fedavg")
    rounds = [line for line in lines if line.startswith("round")]
    assert len(rounds) == 3
    assert all(part in rounds[-1] for part in ("round   2/2", "accuracy", "MB", "left 0:00"))


@pytest.mark.parametrize("strategy", ["FedProx", "FedAdam"])
def test_flowers_own_strategies_run_unchanged_and_evaluate_on_nodes(run, strategy):
    name = f"flwr.serverapp.strategy:{strategy}"
    folder = run(strategy=name, fraction_evaluate=1.0, train__proximal_mu=0.1)
    assert len(rows(folder)) == 3
    assert rows(folder)[-1]["loss"] != rows(folder)[0]["loss"]


@pytest.mark.parametrize("strategy", ["fedhead", "fedhead-plus", "feddf"])
def test_each_strategy_runs_by_its_name_and_the_model_moves(run, strategy):
    folder = run(strategy=strategy)
    assert [row["round"] for row in rows(folder)] == [0, 1, 2]
    assert len({row["loss"] for row in rows(folder)}) == 3
    assert (folder / "topology.json").exists() == (strategy != "feddf")
    assert (rows(folder)[-1]["link_bytes"] > 0) == (strategy != "feddf")


@pytest.mark.pictures
def test_the_leaders_of_each_round_are_in_the_topology_and_its_picture(run):
    folder = run(strategy="fedhead", num_rounds=3, fedhead__distill_epochs=1)
    topology = read(folder, "topology")
    assert list(topology["heads"]) == ["1", "2", "3"]
    sectors = [{c["head"], *c["members"]} for c in topology["clusters"]]
    nodes = sorted(node for sector in sectors for node in sector)
    assert nodes == [f"node-{place}" for place in range(4)]
    for leaders in topology["heads"].values():
        assert all(leader in sector for leader, sector in zip(leaders, sectors, strict=True))
    assert topology["heads"]["3"] == [c["head"] for c in topology["clusters"]]
    assert (folder / "topology.png").read_bytes()[:4] == b"\x89PNG"


def test_texts_are_trained_on(run, tmp_path):
    lines = [f"{i % 4}\tstory {i} of word{i % 4}" for i in range(40)]
    for part in ("train", "test"):
        (tmp_path / f"{part}.tsv").write_text("\n".join(["label\ttext", *lines]) + "\n")
    settings = {"partition__scheme": "iid", "data_root": str(tmp_path)}
    folder = run(strategy="fedhead", dataset="ag-news", **settings)
    assert read(folder, "summary")["accuracy"] is not None


def readings(root, download):
    """A table of two columns, the second far from 0 and larger in one class of two."""
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 2
    values = np.stack([rng.normal(size=60), rng.normal(100 + 90 * labels, 9)], axis=1)
    samples = RawSamples(values[..., None, None], labels)
    spec = DataSpec("readings", (2, 1, 1), 2, (0.0, 145.0), (1.0, 45.0), kind="table")
    return Dataset(spec, samples, samples)


def test_a_table_from_another_package_is_trained_on(run, monkeypatch):
    path = "flwr_distill.task.datasets.registry.import_object"
    monkeypatch.setattr(path, lambda name: readings)
    own = {"partition__scheme": "iid", "train__lr": 0.1}
    folder = run(strategy="fedavg", dataset="mine:readings", model="mlp", num_rounds=3, **own)
    assert read(folder, "summary")["accuracy"] > 0.9


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    ["fednova", "feddyn", "scaffold", "moon", "fedfa", "vhl", "fedseq", "fedseq-zaccone"],
)
def test_baselines_learn_the_digits_in_a_few_rounds(run, strategy):
    partition = {"partition__scheme": "dirichlet", "partition__alpha": 2.0}
    folder = run(strategy=strategy, num_rounds=4, train__local_epochs=2, **partition)
    first, *_, last = rows(folder)
    assert first["accuracy"] < 0.3
    assert last["accuracy"] > 0.7


def test_measured_fedavg_traffic_is_the_formulas_plus_the_last_way_down(run):
    """Eq. 3 counts (2T - 1) transfers a client: Flower's first round sends the start model too."""
    traffic = read(run(strategy="fedavg", num_rounds=3), "traffic")
    train = sum(traffic["measured"]["train"].values())
    assert train == pytest.approx(traffic["formulas"]["fedavg (HFLDD, eq. 3)"] * 6 / 5, rel=0.03)


def test_one_seed_gives_one_result_to_the_last_bit(run):
    """Whatever random node ids Flower gives: here they run backwards in the second run."""
    first = run(run_id=1, seed=3)
    second = run(run_id=2, seed=3, grid={"first_node": 5000, "step": -7})
    other = run(run_id=3, seed=4)
    model = [
        hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        for folder in (first, second, other)
    ]
    assert model[0] == model[1]
    assert model[0] != model[2]


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"hfldd__groups": 9}, "hfldd.groups"),
        ({"strategy": "fedagv"}, "fedagv"),
        ({"model": "hfldd-mnist"}, "hfldd-mnist"),
        ({"dataset": "mnits"}, "mnits"),
        ({"num_rouns": 3}, "num-rouns"),
    ],
)
def test_a_wrong_setting_ends_the_run_before_any_node_trains(run, settings, word, caplog):
    kinds = []

    def note(node, message):
        kinds.append(message.metadata.message_type)
        return False

    with caplog.at_level(logging.INFO), pytest.raises((SettingsError, ValueError), match=word):
        run(grid={"broken": note}, **settings)
    assert set(kinds) <= {"query.describe"}


def nothing(message):
    return RecordDict()


def nonsense(message):
    metrics = {"num-examples": -3, "partition-id": math.nan, "sector": 1e300, "train-loss": [1.0]}
    return RecordDict(
        {
            "metrics": MetricRecord(metrics),
            "config": ConfigRecord({"dataset": b"\xff"}),
            "introduction": ConfigRecord({"public-key": "none"}),
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "strategy"),
    [
        *((nonsense, strategy) for strategy in ("fedavg", "hfldd", "fedhead", "cadis", "fedlgd")),
        (nothing, "fedavg"),
        *(
            pytest.param(nothing, strategy, marks=pytest.mark.matrix)
            for strategy in ("hfldd", "fedhead", "cadis", "fedlgd")
        ),
    ],
)
def test_the_run_continues_without_a_node_that_answers_nonsense(run, strategy, answer):
    def spoil(grid):
        grid.nodes[sorted(grid.nodes)[2]] = answer

    settings = {"strategy": strategy, "partition__classes": 5, "num_rounds": 1, "min_nodes": 3}
    first, last = rows(run(spoil=spoil, **settings))
    assert math.isfinite(last["loss"])
    assert last["loss"] != first["loss"]


def squares(root, download):
    """Two classes in colour: a bright square to the left, or to the right."""
    images = np.zeros((60, 3, 12, 10), np.uint8)
    labels = np.arange(60) % 2
    for image, label in zip(images, labels, strict=True):
        image[:, 3:9, 5 * label : 5 * label + 5] = 220
    samples = RawSamples(images, labels)
    return Dataset(DataSpec("squares", (3, 12, 10), 2, (0.5,) * 3, (0.5,) * 3), samples, samples)


@pytest.mark.parametrize("strategy", ["fedavg", "fedlgd"])
def test_each_node_is_evaluated_on_its_own_test_samples_and_all_count_the_same(
    memory_grid, tmp_path, monkeypatch, strategy
):
    monkeypatch.setattr("flwr_distill.task.datasets.registry.import_object", lambda name: squares)
    run_config = {
        **QUICK,
        "strategy": strategy,
        "dataset": "private",
        "private.shape": "3x8x8",
        "fraction-evaluate": 1.0,
        "runs-dir": str(tmp_path),
    }

    def node(place, dataset):
        own = {"partition-id": place, "dataset": dataset, "state-dir": str(tmp_path / "state")}
        context = Context(3, place + 1, own, RecordDict(), run_config)
        return lambda message: app(message, context).content

    grid = memory_grid({1: node(0, "digits"), 2: node(1, "mine:squares")})
    main(grid, Context(3, 1, {}, RecordDict(), run_config))
    folder = tmp_path / "3"
    for row, phase in zip(rows(folder)[1:], phases(folder, "evaluate"), strict=True):
        assert sorted(n["num-examples"] for n in phase["nodes"].values()) == [60, 360]
        accuracies = [n["eval-accuracy"] for n in phase["nodes"].values()]
        assert row["node_accuracy"] == pytest.approx(np.mean(accuracies))
        assert (row["round"], row["accuracy"]) == (phase["round"], None)
    assert [row["node_accuracy"] is None for row in rows(folder)] == [True, False, False]
    nodes = read(folder, "about")["nodes"].values()
    assert [each["name"] for each in nodes] == ["digits/0", "mine:squares/1"]
