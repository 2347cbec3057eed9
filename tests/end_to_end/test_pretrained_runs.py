"""Whole runs on a pretrained network from a file, with low-rank updates of it."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from benchmarks.in_process import run_in_process
from flwr_distill.protocol.arrays import as_arrays
from flwr_distill.server.export.model import export_model
from flwr_distill.server.export.prediction import ModelFileError, read_model
from flwr_distill.server.page.run_files import read_run
from flwr_distill.server.record.checkpoint import checkpoints, load_checkpoint
from flwr_distill.task.datasets import load_dataset

NODES = 3
UPDATES = {"network.first.up.weight", "network.last.up.weight"}
TRAINED = {"head.weight", "head.bias"} | UPDATES


class Features(nn.Module):
    """Two convolutions of grey images."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 12, 3)

    def forward(self, images):
        return nn.functional.adaptive_avg_pool2d(self.last(self.first(images).relu()), 2).flatten(1)


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """Play a run on weights from a file; its rows and its folder."""
    weights = tmp_path_factory.mktemp("weights") / "features.safetensors"
    torch.manual_seed(7)
    save_file(Features().state_dict(), weights)
    config = {
        "dataset": "digits",
        "strategy": "fedavg",
        "num-rounds": 2,
        "partition.scheme": "iid",
        "train.lr": 0.5,
        "backbone.network": f"{__name__}:Features",
        "backbone.weights": str(weights),
        "backbone.trains": "lora",
        "backbone.rank": 4,
    }

    def play(folder=None, **settings):
        folder = folder or tmp_path_factory.mktemp("runs")
        nodes = [{"num-partitions": NODES}] * NODES
        return run_in_process(config | settings, nodes, folder), folder / "1"

    return play


@pytest.fixture(scope="module")
def played(play):
    return play()


def models_of(folder):
    files = checkpoints(folder)
    return {number: as_arrays(load_checkpoint(file).arrays) for number, file in files.items()}


def test_updates_and_head_alone_are_sent_trained_and_kept_each_round(played):
    rows, folder = played
    assert rows[2]["accuracy"] > max(rows[0]["accuracy"], 0.5)
    models = models_of(folder)
    assert all(model.keys() == TRAINED for model in models.values())
    assert all(not np.array_equal(models[1][name], models[2][name]) for name in TRAINED)
    each_way = 4 * sum(array.size for array in models[2].values())
    sent = rows[2]["server_bytes"] - rows[1]["server_bytes"]
    assert 2 * NODES * each_way < sent < 2 * NODES * (each_way + 5000)


def test_a_run_resumes_on_its_network(play):
    whole, _ = play(**{"num-rounds": 2})
    _, folder = play(**{"num-rounds": 1})
    resumed, _ = play(folder.parent, resume="1")
    assert [row["accuracy"] for row in resumed] == [row["accuracy"] for row in whole]


def test_updates_pass_under_masks(play, played):
    _, folder = played
    _, masked = play(**{"secure-sums": True})
    plain, summed = models_of(folder)[1], models_of(masked)[1]
    assert plain.keys() == summed.keys()
    for name, array in plain.items():
        np.testing.assert_allclose(summed[name], array, atol=2e-3, rtol=0)


def test_the_model_is_exported_with_its_updates(played, tmp_path):
    rows, folder = played
    file = export_model(read_run(folder), "onnx", tmp_path)
    model = read_model(file)
    assert model.description.backbone.rank == 4
    test = load_dataset("digits").test.to_samples(model.description.spec)
    hits = (model.logits(test.inputs).argmax(1) == test.labels).double().mean()
    assert float(hits) == pytest.approx(rows[2]["accuracy"], abs=1e-6)
    weights = export_model(read_run(folder), "safetensors", tmp_path)
    assert load_file(weights).keys() > TRAINED
    with pytest.raises(ModelFileError, match="code of your own"):
        read_model(weights)


@pytest.mark.parametrize("form", ["onnx", "safetensors"])
def test_a_head_on_fourier_features_is_exported_with_them(tmp_path, form):
    config = {
        "dataset": "digits",
        "strategy": "analytic",
        "num-rounds": 1,
        "model": "random-features",
        "backbone.fourier": 64,
    }
    rows = run_in_process(config, [{"num-partitions": 2}] * 2, tmp_path)
    model = read_model(export_model(read_run(tmp_path / "1"), form, tmp_path / "out"))
    test = load_dataset("digits").test.to_samples(model.description.spec)
    hits = (model.logits(test.inputs).argmax(1) == test.labels).double().mean()
    assert float(hits) == pytest.approx(rows[1]["accuracy"], abs=2e-3)
