"""Whole runs that train on from the head in closed form: whatever the strategy, whatever trains."""

import numpy as np
import pytest
from torch import nn

from benchmarks.in_process import run_in_process
from flwr_distill.protocol.arrays import as_arrays
from flwr_distill.server.record.checkpoint import checkpoints, load_checkpoint
from flwr_distill.server.record.frozen import load_frozen
from flwr_distill.task.backbones import Frozen

NODES = 4
WIDTH = 48
CONFIG = {
    "dataset": "digits",
    "model": f"{__name__}:small",
    "num-rounds": 1,
    "partition.classes": 3,
    "train.local-epochs": 1,
    "train.lr": 0.1,
    "hfldd.auxiliary-size": 20,
    "hfldd.distiller": "dm",
    "hfldd.distill-steps": 2,
    "hfldd.distilled-size": 6,
    "fedhead.distill-epochs": 1,
    "fedlgd.per-class": 2,
    "fedlgd.first-steps": 2,
    "fedlgd.refine-steps": 1,
    "fedlgd.global-per-class": 1,
    "fedlgd.global-steps": 1,
}
HEAD = {"head.weight", "head.bias"}
TRAINED = {
    "head": HEAD,
    "last-block": {*HEAD, "network.last.weight", "network.last.bias"},
    "all": {*HEAD, *(f"network.{p}.{n}" for p in ("first", "last") for n in ("weight", "bias"))},
}


class Small(nn.Module):
    """Two convolutions."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 8, 3), nn.Conv2d(8, WIDTH // 4, 3)

    def forward(self, images):
        return nn.functional.adaptive_avg_pool2d(self.last(self.first(images).relu()), 2).flatten(1)


def small(spec):
    return Frozen(Small(), WIDTH, spec)


def play(folder, **settings):
    """Rows of a run, and its models by round."""
    rows = run_in_process(CONFIG | settings, [{"num-partitions": NODES}] * NODES, folder)
    frozen = {name: weight.numpy() for name, weight in load_frozen(folder / "1").items()}
    models = {
        number: frozen | as_arrays(load_checkpoint(file).arrays)
        for number, file in checkpoints(folder / "1").items()
    }
    return rows, models


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The model that the head in closed form makes, and its accuracy."""
    rows, models = play(tmp_path_factory.mktemp("alone"), strategy="analytic")
    return models[1], rows[1]["accuracy"]


CASES = [
    ("fedhead", "last-block"),
    *(
        pytest.param(strategy, part, marks=pytest.mark.matrix)
        for strategy in ("fedavg", "fedhead", "cadis", "hfldd", "fedlgd")
        for part in TRAINED
        if (strategy, part) != ("fedhead", "last-block")
    ),
]


@pytest.mark.parametrize(("strategy", "part"), CASES)
def test_training_begins_with_the_head_of_all_data_and_changes_what_it_should(
    tmp_path, alone, strategy, part
):
    changes = {"strategy": strategy, "start": "analytic", "backbone.trains": part}
    rows, models = play(tmp_path, **changes)
    expected, accuracy = alone
    assert rows[0]["accuracy"] == accuracy > 0.5
    assert [row["set_aside"] for row in rows] == [0, 0]
    for name, array in expected.items():
        np.testing.assert_allclose(models[0][name], array, atol=1e-5, rtol=0)
    changed = {name for name in expected if not np.array_equal(models[0][name], models[1][name])}
    assert changed == TRAINED[part]
