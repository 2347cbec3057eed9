"""Baselines on real processes, in two runs of which the second resumes the first."""

import json
from pathlib import Path

import pytest

from benchmarks.in_process import run_in_process
from flwr_distill.fleet.local_federation import LocalFederation
from tests.matrix import BASELINES

ROOT = Path(__file__).resolve().parents[2]
NODES = 3


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("federation")
    with LocalFederation(NODES, folder / "state", direct_links=True) as running:
        running.folder = folder
        yield running


@pytest.mark.parametrize(
    ("strategy", "links"),
    [
        pytest.param("fedseq", "direct", marks=pytest.mark.matrix),
        *(pytest.param(strategy, "relay", marks=pytest.mark.matrix) for strategy in BASELINES),
    ],
)
def test_a_resumed_run_on_real_processes_learns_what_a_whole_one_in_one_process_does(
    federation, little_distillation, strategy, links
):
    config = {
        **little_distillation,
        "strategy": strategy,
        "links": links,
        "num-rounds": 2,
        "min-nodes": NODES,
        "train.local-epochs": 1,
        "train.batch-size": 64,
        "fraction-evaluate": 1.0,
        "phase-timeout": 120.0,
    }
    nodes = [{"partition-id": place, "num-partitions": NODES} for place in range(NODES)]
    whole = run_in_process(config | {"links": "relay"}, nodes)

    config["runs-dir"] = str(federation.folder / "runs")
    first = federation.run(ROOT, config | {"num-rounds": 1}, timeout=240)
    assert first.completed, first.lines[-20:]
    second = federation.run(ROOT, config | {"resume": str(first.run_id)}, timeout=240)
    assert second.completed, second.lines[-20:]
    folder = federation.folder / "runs" / str(first.run_id)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    assert [row["round"] for row in rows] == [0, 1, 2]
    for row, same in zip(rows, whole, strict=True):
        for measure in ("accuracy", "loss", "node_accuracy"):
            assert row[measure] == pytest.approx(same[measure], abs=1e-5)
    if strategy == "fedseq":  # the others send nothing from node to node
        assert rows[-1]["link_bytes"] > 0
