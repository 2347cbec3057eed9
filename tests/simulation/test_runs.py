"""A simulation gives the model that real nodes give, whatever the number of workers."""

import json

import pytest

from benchmarks.in_process import run_in_process
from flwr_distill.simulation.run import simulate

NODES = 4
TASK = {
    "dataset": "digits",
    "model": "digits-cnn",
    "num-rounds": 2,
    "partition.classes": 3,
    "server-device": "cpu",
}
NODE = {"num-partitions": NODES, "device": "cpu"}


def model_of(folder):
    return (folder / "model.safetensors").read_bytes()


def simulated(runs_dir, workers, **config):
    return simulate({**TASK, **config}, [NODE] * NODES, runs_dir, workers=workers)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "counts"), [("fedavg", (1, 2, 4)), ("hfldd", (2,))])
def test_one_seed_gives_one_model_whatever_the_number_of_workers(
    strategy, counts, tmp_path, little_distillation
):
    config = {**little_distillation, "strategy": strategy}
    run_in_process({**TASK, **config}, [NODE] * NODES, tmp_path)
    for count in counts:
        folder = simulated(tmp_path / f"by-{count}", count, **config)
        assert model_of(folder) == model_of(tmp_path / "1")


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_model(tmp_path):
    whole = simulated(tmp_path / "whole", 2, strategy="scaffold")
    short = simulated(tmp_path / "short", 2, strategy="scaffold", **{"num-rounds": 1})
    simulated(tmp_path / "short", 1, strategy="scaffold", resume="latest")
    assert model_of(short) == model_of(whole)
    rows = [json.loads(line) for line in (short / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [0, 1, 2]
