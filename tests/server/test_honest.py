"""No honest node is rejected, however few samples and classes it has."""

import json

import numpy as np
import pytest

from benchmarks.in_process import run_in_process
from flwr_distill.task.datasets import load_dataset

SIZES = [12, 20, 34, 57, 95, 1200]
NODES = [{"partition-id": i, "num-partitions": len(SIZES)} for i in range(len(SIZES))]
LITTLE = {
    "train.local-epochs": 1,
    "train.batch-size": 60,
    "hfldd.auxiliary-size": 16,
    "hfldd.distill-steps": 5,
    "fedhead.distill-epochs": 1,
    "fedlgd.first-steps": 5,
    "fedlgd.global-steps": 2,
}


@pytest.fixture(scope="module")
def skewed(tmp_path_factory):
    """A split of digits of 12 to 1,200 samples; all but the last node have one class or two."""
    order = np.argsort(load_dataset("digits").train.labels, kind="stable")
    parts = np.split(order, np.cumsum(SIZES))
    file = tmp_path_factory.mktemp("split") / "split.json"
    file.write_text(json.dumps({str(i): parts[i].tolist() for i in range(len(SIZES))}))
    return {"partition.scheme": "index-file", "partition.index-file": str(file)}


@pytest.mark.parametrize("strategy", ["fedavg", "hfldd", "fedhead", "cadis", "fedlgd"])
def test_no_honest_node_of_any_size_is_set_aside(skewed, strategy):
    own = {key: value for key, value in LITTLE.items() if key.split(".")[0] in ("train", strategy)}
    rows = run_in_process({"strategy": strategy, "num-rounds": 2, **skewed, **own}, NODES)
    assert [row["set_aside"] for row in rows] == [0, 0, 0]
