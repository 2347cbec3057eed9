"""The app bundle runs on any Flower's own processes: `make test-flower VERSION=1.42.0`."""

import json
import math
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import numpy as np
import pytest

from benchmarks.flower_federation import FlowerFederation
from flwr_distill import ROOMS
from flwr_distill.node.outbox import FOLDER, entries
from flwr_distill.node.sandbox import why_no_sandbox
from flwr_distill.node.stock import is_stock
from flwr_distill.node.supervisor import status_file
from flwr_distill.task.datasets import load_dataset

from .conftest import ROOT

STRATEGIES = ("fedavg", "hfldd", "fedhead", "cadis", "fedlgd")


def test_the_published_app_has_all_folders_of_its_package(app):
    assert all((app / room / "__init__.py").is_file() for room in ("flwr_distill", *ROOMS))


@pytest.mark.deployment("strategies beside Flower's own SuperNodes")
@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_trains_three_nodes_of_a_stock_flower(strategy, stock, app, little_distillation):
    runs = stock.folder / strategy
    config = {
        **{key: v for key, v in little_distillation.items() if key.startswith(f"{strategy}.")},
        "strategy": strategy,
        "num-rounds": 2,
        "min-nodes": 3,
        "phase-timeout": 300.0,
        "runs-dir": str(runs),
    }
    printed = "\n".join(stock.run(app, config).lines)
    about = f"{printed[-4000:]}\n{stock.log.read_text()[-4000:]}"
    rows, phases = (
        [json.loads(line) for f in runs.glob(f"*/{name}.jsonl") for line in f.open()]
        for name in ("metrics", "journal")
    )
    assert [row["round"] for row in rows] == [0, 1, 2], about
    assert all(math.isfinite(row["loss"]) for row in rows), about
    assert len({row["loss"] for row in rows}) == 3, about  # each round made another model
    assert all(len(entry["nodes"]) == entry["asked"] for entry in phases if "asked" in entry), about
    assert not [entry for entry in phases if "warning" in entry or "error" in entry], about
    (summary,) = runs.glob("*/summary.json")
    assert json.loads(summary.read_text())["strategy"] == strategy
    own_way = printed.count("go Flower's own way")
    assert own_way == (0 if version("flwr").startswith("1.32.") else 1), about


@pytest.mark.deployment("an app of one's own")
@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_an_app_of_ones_own_with_our_handlers_runs_on_a_stock_flower(stock, app, tmp_path):
    own = tmp_path / "own-app"  # with our packages in its bundle, since they are not installed
    shutil.copytree(app, own)
    shutil.copytree(ROOT / "examples" / "own-app", own, dirs_exist_ok=True)
    outcome = stock.run(own, {"num-server-rounds": 2})
    assert (stock.folder / "final_model.pt").is_file(), "\n".join(outcome.lines[-60:])


@pytest.mark.deployment("a killed worker")
@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.skipif(is_stock(), reason="Flower's own SuperNode does the work of our node here")
def test_a_killed_worker_of_our_node_is_replaced_and_the_run_goes_on(stock, app):
    runs = stock.folder / "killed"
    config = {
        "strategy": "fedavg",
        "num-rounds": 3,
        "min-nodes": 3,
        "phase-timeout": 300.0,
        "runs-dir": str(runs),
    }

    def rounds():
        return [
            json.loads(line)["round"] for f in runs.glob("*/metrics.jsonl") for line in f.open()
        ]

    def worker():
        return json.loads(status_file(stock.nodes[0].state_dir).read_text())["ready"]

    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(stock.run, app, config)
        while 1 not in rounds():
            assert not run.done(), run.result().lines[-40:]
            time.sleep(0.2)
        killed = worker()
        os.kill(killed, signal.SIGKILL)
        outcome = run.result()
    about = "\n".join(outcome.lines[-40:])
    assert outcome.completed, about
    assert rounds() == [0, 1, 2, 3], about
    assert worker() != killed
    journal = [json.loads(line) for f in runs.glob("*/journal.jsonl") for line in f.open()]
    last = [entry for entry in journal if "asked" in entry][-1]
    assert len(last["nodes"]) == last["asked"], about


@pytest.fixture(scope="module")
def hospital(tmp_path_factory):
    """Start two nodes of ours with images and the policy `hospital`, whose classes it needs."""
    folder = tmp_path_factory.mktemp("hospital")
    digits = load_dataset("digits").train
    np.savez(folder / "scans.npz", images=digits.images[:, 0], labels=digits.labels)
    policy = {"extends": "hospital", "classes": [str(label) for label in range(10)]}
    settings = {"policy": policy, "data": str(folder / "scans.npz")}
    with FlowerFederation(2, folder / "federation", ours=2, node_settings=settings) as federation:
        yield federation


@pytest.mark.deployment("policy `hospital`: refusals, outbox, sandbox")
@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.skipif(is_stock(), reason="Flower's own SuperNode does the work of our node here")
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_a_hospitals_node_refuses_by_rule_and_writes_down_what_leaves(hospital, app, noise):
    before = [len(list(entries(node.state_dir / FOLDER))) for node in hospital.nodes]
    config = {
        **{"strategy": "fedavg", "num-rounds": 1, "min-nodes": 2, "train.dp-noise": noise},
        **{"dataset": "private", "private.shape": "1x8x8", "model": "digits-cnn"},
        **{"runs-dir": str(hospital.folder / f"runs-{noise}")},
    }
    about = "\n".join(hospital.run(app, config, timeout=300.0).lines[-60:])
    assert ("least-noise" in about) == (noise == 0), about
    for node, count in zip(hospital.nodes, before, strict=True):
        left = list(entries(node.state_dir / FOLDER))[count:]
        if noise:
            assert next(entry["epsilon"] for entry in left if entry["type"] == "train") > 0, left
            assert not [entry for entry in left if "error" in entry], left
        else:
            assert "least-noise" in left[0]["error"], left
    assert ("the app runs in a sandbox" in hospital.log.read_text()) == (not why_no_sandbox())
