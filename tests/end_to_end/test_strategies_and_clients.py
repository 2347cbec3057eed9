"""Whole runs of our ServerApp with our ClientApp in this process; only the wire is in memory."""

import hashlib
import json
import logging

import pytest
from flwr.app import Context, RecordDict

from flwr_distill.server.app import main
from flwr_distill.task.errors import SettingsError

QUICK = {"num-rounds": 2, "train.local-epochs": 1, "hfldd.distill-steps": 3}


@pytest.fixture
def run(client_grid, tmp_path):
    """Run the ServerApp; returns the run's folder."""

    def start(num_nodes=4, run_id=7, broken=lambda node, message: False, ids=None, **settings):
        overrides = {key.replace("__", ".").replace("_", "-"): v for key, v in settings.items()}
        run_config = {
            **QUICK,
            "min-nodes": num_nodes,
            "runs-dir": str(tmp_path / "runs"),
            "phase-timeout": 120.0,
            **overrides,
        }
        context = Context(run_id, 1, {}, RecordDict(), run_config)
        main(client_grid(num_nodes, run_config, broken, **(ids or {})), context)
        return tmp_path / "runs" / str(run_id)

    return start


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_metrics_settings_topology_traffic_curve_and_model(run):
    folder = run(strategy="hfldd")
    assert [row["round"] for row in rows(folder)] == [0, 1, 2]
    assert json.loads((folder / "settings.json").read_text())["num-rounds"] == 2
    topology = json.loads((folder / "topology.json").read_text())
    named = [n for c in topology["clusters"] for n in (c["head"], *c["members"])]
    assert sorted(named) == ["node-0", "node-1", "node-2", "node-3"]
    traffic = json.loads((folder / "traffic.json").read_text())
    measured = sum(s for phase in traffic["measured"].values() for s in phase.values())
    summary = json.loads((folder / "summary.json").read_text())
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
    assert "round   2/2" in rounds[-1]
    for part in ("accuracy", "MB", "left 0:00"):
        assert part in rounds[-1]


@pytest.mark.parametrize(
    "strategy",
    [
        "flwr.serverapp.strategy:FedProx",
        "flwr.serverapp.strategy:FedAdam",
    ],
)
def test_flowers_own_strategies_run_unchanged_and_evaluate_on_nodes(run, strategy):
    folder = run(strategy=strategy, fraction_evaluate=1.0, train__proximal_mu=0.1)
    assert len(rows(folder)) == 3
    assert rows(folder)[-1]["loss"] != rows(folder)[0]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["fednova", "feddyn", "scaffold", "moon", "fedfa", "vhl", "fedseq"]
)
def test_baselines_learn_the_digits_in_a_few_rounds(run, strategy):
    folder = run(
        strategy=strategy,
        num_rounds=4,
        partition__scheme="dirichlet",
        partition__alpha=2.0,
        train__local_epochs=2,
    )
    first, *_, last = rows(folder)
    assert first["accuracy"] < 0.3
    assert last["accuracy"] > 0.7


def test_measured_fedavg_traffic_is_the_formulas_plus_the_last_way_down(run):
    """Eq. 3 counts (2T - 1) transfers a client: Flower's first round sends the start model too."""
    folder = run(strategy="fedavg", num_rounds=3)
    traffic = json.loads((folder / "traffic.json").read_text())
    train = sum(traffic["measured"]["train"].values())
    expected = traffic["formulas"]["fedavg (HFLDD, eq. 3)"] * 6 / 5
    assert train == pytest.approx(expected, rel=0.03)


def test_one_seed_gives_one_result_to_the_last_bit(run):
    """Whatever random node ids Flower gives: here they run backwards in the second run."""
    first = run(run_id=1, seed=3)
    second = run(run_id=2, seed=3, ids={"first_node": 5000, "step": -7})
    other = run(run_id=3, seed=4)
    model = [
        hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        for folder in (first, second, other)
    ]
    assert model[0] == model[1]
    assert model[0] != model[2]


def test_a_node_that_errors_in_one_round_does_not_end_the_run(run):
    def broken(node, message):
        config = message.content.config_records.get("config", {})
        return node == 1 and config.get("server-round") == 1

    folder = run(strategy="fedavg", broken=broken)
    assert [row["round"] for row in rows(folder)] == [0, 1, 2]


def test_private_data_need_no_dataset_on_the_server(client_grid, tmp_path):
    import numpy as np

    generator = np.random.default_rng(0)
    images = generator.integers(0, 255, size=(40, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "ward.npz", images=images, labels=np.arange(40) % 2)
    run_config = {
        **QUICK,
        "strategy": "fedavg",
        "dataset": "private",
        "private.shape": "1x8x8",
        "private.num-classes": 2,
        "runs-dir": str(tmp_path),
        "fraction-evaluate": 1.0,
    }
    grid = client_grid(2, run_config, node_config={"data": str(tmp_path / "ward.npz")})
    main(grid, Context(5, 1, {}, RecordDict(), run_config))
    summary = json.loads((tmp_path / "5" / "summary.json").read_text())
    assert summary["accuracy"] is None
    assert summary["server_bytes"] > 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"hfldd__groups": 9}, r"hfldd\.groups = 9: there are 4 nodes"),
        ({"strategy": "fedagv"}, "strategy = 'fedagv'"),
        ({"model": "hfldd-mnist"}, "'hfldd-mnist' does not fit"),
        ({"dataset": "mnits"}, "dataset='mnits' is unknown"),
        ({"num_rouns": 3}, "num-rouns: is not a known key (did you mean num-rounds"),
    ],
)
def test_a_wrong_setting_ends_the_run_before_any_node_trains(run, settings, said, caplog):
    asked = []

    def note(node, message):
        asked.append(message.metadata.message_type)
        return False

    with caplog.at_level(logging.INFO), pytest.raises((SettingsError, ValueError), match=said):
        run(broken=note, **settings)
    assert set(asked) <= {"query.describe"}
