"""Our app on a federation of real processes: SuperLink, nodes, gRPC."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from flwr_distill.cli.main import app
from flwr_distill.fleet.local_federation import LocalFederation

from .one_place import MODEL, SPLITS, head_of_all, split

ROOT = Path(__file__).resolve().parents[2]
NODES = 3

PACKAGE = {
    "pyproject.toml": """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "someones-strategies"
version = "1.0"
[tool.setuptools]
py-modules = ["someones_strategies"]
[project.entry-points."flwr_distill.methods"]
decay = "someones_strategies:Decay"
""",
    "someones_strategies.py": '''
from flwr.app import MetricRecord
from flwr.serverapp.strategy import FedAvg, Result


class Decay(FedAvg):
    """FedAvg whose learning rate falls by a tenth each round; node trouble in round 1."""

    def configure_train(self, server_round, arrays, config, grid):
        config["lr"] = 0.05 * 0.9 ** (server_round - 1)
        messages = list(super().configure_train(server_round, arrays, config, grid))
        if server_round == 1:  # one node gets a setting that it must refuse
            content = messages[0].content.copy()
            content["config"] = type(config)({**config, "lr": -1.0})
            messages[0].content = content
        return messages


class OwnLoop(FedAvg):
    """A loop of its own, which evaluates by itself and ends a round early."""

    def start(self, grid, initial_arrays, num_rounds, timeout, train_config, **_):
        result = Result(arrays=initial_arrays)
        for number in range(1, num_rounds):
            messages = self.configure_train(number, result.arrays, train_config, grid)
            replies = grid.send_and_receive(messages, timeout=timeout)
            result.arrays, _ = self.aggregate_train(number, replies)
            result.evaluate_metrics_serverapp[number] = MetricRecord({"size": len(result.arrays)})
        return result


class OwnEvaluation(FedAvg):
    """Flower's loop, with an evaluation in place of the ServerApp's."""

    def start(self, *args, **kwargs):
        evaluate = lambda number, arrays: MetricRecord({"size": len(arrays)})
        return super().start(*args, **{**kwargs, "evaluate_fn": evaluate})
''',
}


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """Three real nodes, and another package with a strategy installed beside ours."""
    folder = tmp_path_factory.mktemp("federation")
    package, site = folder / "package", folder / "site"
    package.mkdir()
    for name, text in PACKAGE.items():
        (package / name).write_text(text)
    subprocess.run(
        [
            *("uv", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps"),
            *("--python", sys.executable, "--target", str(site), str(package)),
        ],
        check=True,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        },
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(site))
        with LocalFederation(NODES, folder / "state") as running:
            running.folder = folder
            yield running


def run(federation, **settings):
    overrides = {key.replace("__", ".").replace("_", "-"): v for key, v in settings.items()}
    config = {
        "min-nodes": NODES,
        "num-rounds": 2,
        "runs-dir": str(federation.folder / "runs"),
        "phase-timeout": 120.0,
        **overrides,
    }
    outcome = federation.run(ROOT, config, timeout=240)
    return outcome, federation.folder / "runs" / str(outcome.run_id)


def _digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def hfldd(federation):
    """The outcome and the folder of a run of HFLDD."""
    return run(federation, strategy="hfldd", hfldd__distill_steps=5)


@pytest.mark.slow
def test_hfldd_runs_on_real_processes_and_leaves_its_results(hfldd):
    outcome, folder = hfldd
    assert outcome.completed, outcome.lines[-20:]
    assert sum("round " in line and "accuracy" in line for line in outcome.lines) >= 3
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [0, 1, 2]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["link_bytes"] > 0
    topology = json.loads((folder / "topology.json").read_text())
    named = [n for c in topology["clusters"] for n in (c["head"], *c["members"])]
    assert sorted(named) == ["node-0", "node-1", "node-2"]


@pytest.mark.slow
def test_two_real_runs_with_one_seed_give_the_same_model_to_the_last_bit(federation, hfldd):
    _, again = run(federation, strategy="hfldd", hfldd__distill_steps=5)
    digests = [_digest(folder / "model.safetensors") for folder in (hfldd[1], again)]
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_nodes_train_privately_and_each_ones_account_grows_with_the_rounds(federation):
    outcome, folder = run(federation, strategy="fedavg", train__dp_noise=2.0)
    assert outcome.completed, outcome.lines[-20:]
    journal = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    first, second = (entry["nodes"] for entry in journal if entry.get("phase") == "train")
    assert len(first) == NODES
    for node, told in first.items():
        assert 0 < told["dp-epsilon"] < second[node]["dp-epsilon"]
        assert "train-loss" not in told
    report = (folder / "report.html").read_text()
    assert f"The largest epsilon of {NODES} nodes is" in report


@pytest.mark.slow
def test_a_strategy_of_another_package_runs_by_name_and_a_failing_node_does_not_end_it(federation):
    outcome, folder = run(federation, strategy="decay", num_rounds=3)
    assert outcome.completed, outcome.lines[-20:]
    assert any("Received 2 results and 1 failures" in line for line in outcome.lines)
    assert any("Received 3 results and 0 failures" in line for line in outcome.lines)
    assert any("message: lr = -1.0: should be greater than 0" in line for line in outcome.lines)
    assert (folder / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["OwnLoop", "OwnEvaluation"])
def test_a_strategy_with_a_loop_or_evaluation_of_its_own_leaves_report_and_export(
    federation, name, tmp_path
):
    outcome, folder = run(federation, strategy=f"someones_strategies:{name}", num_rounds=3)
    assert outcome.completed, outcome.lines[-20:]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [0, 1, 2, 3][: 3 + (name == "OwnEvaluation")]
    assert rows[-1]["accuracy"] > rows[0]["accuracy"]
    assert (folder / "report.html").exists()
    command = ["runs", "export", str(folder), "--format", "onnx", "--output", str(tmp_path)]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert (tmp_path / "model.onnx").exists()


IN_CI = "one class a node"


def head_of_run(federation, config):
    outcome, folder = run(federation, num_rounds=1, **config)
    assert outcome.completed, outcome.lines[-20:]
    return load_file(folder / "model.safetensors")["head.weight"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == IN_CI else pytest.mark.matrix)
        for name in SPLITS
    ],
)
def test_one_round_of_sums_gives_the_head_of_all_samples_in_one_place(federation, tmp_path, name):
    config = split(name, NODES, tmp_path)
    weight = head_of_run(federation, {"strategy": "analytic", **config})
    head = head_of_all(config, NODES, tmp_path)
    np.testing.assert_allclose(weight, head.weight, atol=1e-5, rtol=0)


@pytest.mark.matrix
def test_nodes_that_are_killed_and_started_again_give_the_same_head(federation):
    config = {"strategy": "analytic", **MODEL, "partition.classes": 3}
    before = head_of_run(federation, config)
    federation.nodes[1].kill()
    assert federation.restart_dead_nodes() == [federation.nodes[1]]
    federation.wait_for_nodes(timeout=120)
    np.testing.assert_allclose(head_of_run(federation, config), before, atol=1e-5, rtol=0)


@pytest.mark.matrix
def test_virtual_features_and_heads_are_all_that_travels_where_a_frozen_networks_head_trains(
    federation,
):
    outcome, folder = run(
        federation,
        strategy="hfldd",
        model="random-features",
        start="analytic",
        hfldd__auxiliary_size=20,
        hfldd__distilled_size=8,  # two of each of a node's four classes
    )
    assert outcome.completed, outcome.lines[-20:]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["accuracy"] > 0.9
    journal = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    made = [entry["nodes"] for entry in journal if entry.get("phase") == "train.distill"]
    numbers = [told["num-values"] for nodes in made for told in nodes.values()]
    assert numbers
    assert set(numbers) == {8 * 1024}
    parcels = rows[-1]["link_bytes"] / len(numbers)
    assert parcels < 8 * 1024 / 2 + 2500  # 4 bits a number, header and seal
    whole = sum(weight.size * 4 for weight in load_file(folder / "model.safetensors").values())
    trained = json.loads((folder / "traffic.json").read_text())["measured"]["train.pool"]
    assert trained["server->node"] < whole  # of two rounds
    assert whole > 4 * 1024 * 64


@pytest.mark.slow
def test_a_wrong_setting_fails_the_run_with_the_reason_in_its_log(federation):
    outcome, folder = run(federation, strategy="hfldd", hfldd__groups=40)
    assert outcome.status == "finished:failed"
    assert any("hfldd.groups = 40: there are 3 nodes" in line for line in outcome.lines)
    assert not (folder / "metrics.jsonl").exists()
