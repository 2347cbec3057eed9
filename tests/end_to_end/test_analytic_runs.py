"""Whole runs of analytic in this process: a late node after a resume, a node taken out, export."""

import os
import shutil
from contextlib import suppress
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file

from benchmarks.in_process import run_in_process
from flwr_distill.server.forget import ForgetError, forget
from flwr_distill.server.record.checkpoint import checkpoints
from flwr_distill.task.datasets import load_dataset
from flwr_distill.task.evaluation import evaluate_model
from flwr_distill.task.models import create_model

from .runs import command, export

CONFIG = {
    "dataset": "digits",
    "model": "random-features",
    "strategy": "analytic",
    "num-rounds": 1,
    "partition.scheme": "iid",
}
DIGITS = load_dataset("digits")
TEST = DIGITS.test.to_samples(DIGITS.spec)


def run(folder, places, **settings):
    """Run on these of three nodes; the accuracy and the head."""
    nodes = [{"num-partitions": 3, "partition-id": place} for place in places]
    rows = run_in_process(CONFIG | settings, nodes, folder)
    weights = load_file(folder / "1" / "model.safetensors")
    assert evaluate_model(model_with(weights), TEST)[0] == pytest.approx(rows[-1]["accuracy"])
    return rows[-1]["accuracy"], weights["head.weight"]


def model_with(weights):
    model = create_model("random-features", DIGITS.spec)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    return model


def test_a_run_goes_on_with_a_late_node_and_without_one_that_left(tmp_path):
    accuracy, of_all = run(tmp_path / "all", (0, 1, 2))
    assert accuracy > 0.95
    _, of_two = run(tmp_path / "grown", (0, 2))
    _, grown = run(tmp_path / "grown", (0, 2, 1), resume="1", **{"num-rounds": 2})
    np.testing.assert_allclose(grown, of_all, atol=1e-5, rtol=0)

    folder = tmp_path / "grown" / "1"
    with pytest.raises(ForgetError, match="'node-7' is not among"):
        forget(folder, ["node-7"])
    command("runs", "forget", folder, "node-1")
    left = load_file(folder / "model.safetensors")["head.weight"]
    np.testing.assert_allclose(left, of_two, atol=1e-5, rtol=0)
    assert list(checkpoints(folder)) == [2]  # the first one knew of the node, too

    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "black.png")
    model, _ = export(folder, "onnx")
    command("predict", model, tmp_path / "black.png")


class Killed(BaseException):
    """Stands in for SIGKILL."""


def test_a_node_is_taken_out_by_the_same_command_again_wherever_that_broke_off(
    tmp_path, monkeypatch
):
    _, of_two = run(tmp_path / "two", (0, 2))
    run(tmp_path / "all", (0, 1, 2))
    run(tmp_path / "all", (0, 1, 2), resume="1", **{"num-rounds": 2})
    step = 0
    for broken_off in count(1):
        folder, step = tmp_path / f"{broken_off}", 0
        shutil.copytree(tmp_path / "all" / "1", folder)

        def breaking(change, broken_off=broken_off):
            def break_off(path, *args, **options):
                nonlocal step
                step += not Path(path).name.startswith(".") or bool(args)
                if step == broken_off:
                    raise Killed
                return change(path, *args, **options)

            return break_off

        with monkeypatch.context() as patched, suppress(Killed):
            patched.setattr("os.replace", breaking(os.replace))
            patched.setattr(Path, "unlink", breaking(Path.unlink))
            forget(folder, ["node-1"])
            break  # it was not broken off
        forget(folder, ["node-1"])
        left = load_file(folder / "model.safetensors")["head.weight"]
        np.testing.assert_allclose(left, of_two, atol=1e-5, rtol=0)
        assert list(checkpoints(folder)) == [2]
    assert broken_off == 4  # before model, older checkpoint and last checkpoint


def test_a_strategy_that_mixes_what_nodes_send_forgets_nobody(tmp_path):
    nodes = [{"num-partitions": 2} for _ in range(2)]
    run_in_process({"strategy": "fedavg", "num-rounds": 1}, nodes, tmp_path)
    with pytest.raises(ForgetError, match="'fedavg' cannot take a node out again"):
        forget(tmp_path / "1", ["node-0"])
