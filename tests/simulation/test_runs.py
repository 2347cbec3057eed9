"""A simulation gives the model that real nodes give, whatever the number of workers."""

import json

import pytest

from benchmarks.in_process import run_in_process
from flwr_distill.node.policy import read_policy
from flwr_distill.protocol.registry import all_methods
from flwr_distill.simulation.run import on_devices, simulate
from tests.matrix import OURS, strategies

pytestmark = pytest.mark.slow

NODES = 4
TASK = {
    "dataset": "digits",
    "model": "digits-cnn",
    "num-rounds": 2,
    "partition.classes": 3,
    "train.local-epochs": 1,
    "train.batch-size": 64,
    "server-device": "cpu",
}
NODE = {"num-partitions": NODES, "device": "cpu"}
SECURE_SUMS = {"strategy": "fedavg", "secure-sums": True}
RELAYED_LINKS = {"strategy": "hfldd", "links": "relay", "hfldd.groups": 2}

BELOW = {"fedavg", "hfldd", "scaffold"}
"""Strategies of the other tests."""


def models_of(folder):
    """The global model of a run; where there is none, those that nodes keep as their own."""
    model = folder / "model.safetensors"
    models = [model] if model.exists() else sorted(folder.parent.glob("nodes/**/own-model@*"))
    assert models
    return [file.read_bytes() for file in models]


@pytest.fixture
def simulated(tmp_path, little_distillation):
    """Runs nodes in so many workers, by default in a folder of its own; gives the run's folder."""

    def run(workers, folder="", **config):
        runs_dir = tmp_path / (folder or f"by-{workers}")
        config = {**TASK, **little_distillation, **config}
        return simulate(config, on_devices([NODE] * NODES, "cpu"), runs_dir, workers=workers)

    return run


@pytest.fixture
def in_process(tmp_path, little_distillation):
    """Runs the same nodes in this process, one after the other; gives the run's folder."""

    def run(**config):
        run_in_process({**TASK, **little_distillation, **config}, [NODE] * NODES, tmp_path / "here")
        return tmp_path / "here" / "1"

    return run


def test_virtual_nodes_train_in_batches_where_that_is_set(simulated):
    together = {"simulation.together": "on", "num-rounds": 1}
    folder = simulated(1, strategy="fedavg", **together)
    assert list((folder.parent / "nodes").glob("runs/*/together-*/done-*"))
    nodes = on_devices([NODE] * NODES, "cpu")
    config = {**TASK, "strategy": "fedavg", **together}
    runs_dir, policy = folder.parent / "guarded", read_policy("open")
    simulate(config, nodes, runs_dir, workers=1, policy=policy)
    assert not list((runs_dir / "nodes").glob("**/together-*"))


def test_one_seed_gives_one_model_whatever_the_number_of_workers(simulated, in_process):
    model = models_of(in_process(strategy="fedavg"))
    for workers in (1, 3):
        assert models_of(simulated(workers, strategy="fedavg")) == model


@pytest.mark.parametrize("strategy", strategies(all_methods().keys() - BELOW, always=OURS))
def test_every_method_gives_the_model_in_workers_that_it_gives_in_one_process(
    strategy, simulated, in_process
):
    config = {"strategy": strategy, "fraction-evaluate": 0.5}
    assert models_of(simulated(2, **config)) == models_of(in_process(**config))


@pytest.mark.parametrize(
    "config",
    [{"strategy": "scaffold"}, SECURE_SUMS, RELAYED_LINKS],
    ids=["state", "secure sums", "links"],
)
def test_a_resumed_run_ends_with_the_same_model(config, simulated, in_process):
    whole = in_process(**config)
    short = simulated(2, "short", **config, **{"num-rounds": 1})
    simulated(1, "short", **config, resume="latest")
    assert models_of(short) == models_of(whole)
    rows = [json.loads(line) for line in (short / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [0, 1, 2]
