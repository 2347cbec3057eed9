"""FedLGD on a federation of real processes, whose nodes name their data set themselves."""

import json
from pathlib import Path

import pytest

from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.fleet.local_federation import LocalFederation
from flwr_distill.storage.store import NodeStore

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_run_ends_with_virtual_data_on_server_and_nodes_and_every_nodes_accuracy(tmp_path):
    settings = {
        "strategy": "fedlgd",
        "dataset": "private",
        "private.shape": "1x8x8",
        "num-rounds": 3,
        "min-nodes": 2,
        "fraction-evaluate": 1.0,
        "partition.scheme": "iid",
        "train.local-epochs": 1,
        "fedlgd.first-steps": 5,
        "fedlgd.refine-steps": 5,
        "fedlgd.global-steps": 5,
        "fedlgd.every": 2,
        "runs-dir": str(tmp_path / "runs"),
        "phase-timeout": 120.0,
    }
    named = {"dataset": "digits"}
    with LocalFederation(2, tmp_path / "state", node_settings=named) as federation:
        outcome = federation.run(ROOT, settings, timeout=240)
    assert outcome.completed, outcome.lines[-20:]
    folder = tmp_path / "runs" / str(outcome.run_id)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(0 <= row["node_accuracy"] <= 1 for row in rows[1:])
    made = VirtualData.from_safetensors((folder / "virtual.safetensors").read_bytes())
    assert made.labels.bincount().tolist() == [10] * 10
    assert made.steps == 2 * 5
    for number in range(2):
        (store,) = tmp_path.glob(f"state/node-{number}/runs/*/*")
        assert NodeStore(store).read("virtual-data")
        assert NodeStore(store).read("global-virtual-data")
