"""Whole runs in this process, in which a node answers every question with nonsense."""

import json
import math

import pytest
from flwr.app import ConfigRecord, Context, MetricRecord, RecordDict

from flwr_distill.server.app import main

FIRST = 2**64 - 1000  # as in conftest.py
NODES = 4
QUICK = {
    "partition.classes": 5,
    "train.local-epochs": 1,
    "hfldd.distill-steps": 2,
    "fedhead.distill-epochs": 1,
    "fedlgd.first-steps": 3,
    "fedlgd.refine-steps": 2,
    "fedlgd.global-steps": 2,
}


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
@pytest.mark.parametrize("strategy", ["fedavg", "hfldd", "fedhead", "cadis", "fedlgd"])
@pytest.mark.parametrize("answer", [nothing, nonsense])
def test_the_run_goes_on_without_that_node(client_grid, tmp_path, strategy, answer):
    run_config = {
        **QUICK,
        "strategy": strategy,
        "num-rounds": 1,
        "min-nodes": NODES - 1,
        "runs-dir": str(tmp_path),
    }
    grid = client_grid(NODES, run_config)
    grid.nodes[FIRST + 2] = answer
    main(grid, Context(7, 1, {}, RecordDict(), run_config))
    lines = (tmp_path / "7" / "metrics.jsonl").read_text().splitlines()
    first, last = (json.loads(line) for line in lines)
    assert math.isfinite(last["loss"])
    assert last["loss"] != first["loss"]
