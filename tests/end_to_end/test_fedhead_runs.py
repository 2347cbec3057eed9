"""Whole FedHEAD runs of our ServerApp with our ClientApp in this process: images, text, tables."""

import json

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from flwr_distill.server.app import main

QUICK = {
    "num-rounds": 2,
    "min-nodes": 4,
    "train.local-epochs": 1,
    "fedhead.distill-epochs": 2,
    "fedhead.server-epochs": 2,
    "fedhead.reference-size": 20,
}


@pytest.fixture
def run(client_grid, tmp_path):
    def start(**settings):
        overrides = {key.replace("__", ".").replace("_", "-"): v for key, v in settings.items()}
        run_config = {**QUICK, "runs-dir": str(tmp_path / "runs"), **overrides}
        main(client_grid(4, run_config), Context(7, 1, {}, RecordDict(), run_config))
        return tmp_path / "runs" / "7"

    return start


@pytest.mark.parametrize("strategy", ["fedhead", "fedhead-plus", "feddf"])
def test_each_strategy_runs_by_its_name_and_the_model_moves(run, strategy):
    folder = run(strategy=strategy)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [0, 1, 2]
    assert len({row["loss"] for row in rows}) == 3
    assert (folder / "topology.json").exists() == (strategy != "feddf")
    assert (rows[-1]["link_bytes"] > 0) == (strategy != "feddf")


def test_the_leaders_of_each_round_are_in_the_topology_and_its_picture(run):
    folder = run(strategy="fedhead", num_rounds=3, fedhead__distill_epochs=1)
    topology = json.loads((folder / "topology.json").read_text())
    assert list(topology["heads"]) == ["1", "2", "3"]
    sectors = [{c["head"], *c["members"]} for c in topology["clusters"]]
    assert sorted(node for sector in sectors for node in sector) == [
        "node-0",
        "node-1",
        "node-2",
        "node-3",
    ]
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
    assert json.loads((folder / "summary.json").read_text())["accuracy"] is not None


def test_tables_are_trained_on(run, tmp_path):
    rng = np.random.default_rng(0)
    rows = [f"{x},{y},{'web' if x > y else 'mail'}" for x, y in rng.random((60, 2))]
    for part in ("train", "test"):
        (tmp_path / f"{part}.csv").write_text("\n".join(["bytes,seconds,label", *rows]) + "\n")
    settings = {"train__optimizer": "adam", "train__lr": 0.01, "num_rounds": 6}
    settings |= {"partition__classes": 1, "train__local_epochs": 3, "data_root": str(tmp_path)}
    folder = run(strategy="fedhead", dataset="csv", **settings)
    assert json.loads((folder / "summary.json").read_text())["accuracy"] > 0.7
