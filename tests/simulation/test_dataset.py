"""All processes of a simulation map one copy of the run's data set."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from flwr_distill.node.nursery import can_fork
from flwr_distill.simulation import workers
from flwr_distill.simulation.dataset import map_dataset, write_dataset
from flwr_distill.simulation.frames import SharedArrays
from flwr_distill.simulation.run import on_devices, simulate
from flwr_distill.task.datasets import Dataset, DataSpec, RawSamples, load_dataset
from flwr_distill.task.datasets.types import fingerprint_of
from flwr_distill.task.settings import TaskSettings
from flwr_distill.task.source import ReadDataset, read_dataset

READERS = Path(os.environ.get("FLWR_DISTILL_TEST_READERS", "readers"))


def digits_of(root, download):
    """The digits; a line in a file says which process has read them."""
    with READERS.open("a") as file:
        file.write(f"{os.getpid()}\n")
    return load_dataset("digits")


def read(dataset):
    return ReadDataset(("digits", "", True, (0.2, 10, 0)), b"state", dataset)


def test_what_is_mapped_is_what_was_read(tmp_path):
    shared, own = SharedArrays(tmp_path, "a"), read(load_dataset("digits"))
    mapped = map_dataset(write_dataset(own, shared, tmp_path), shared)
    assert (mapped.key, mapped.state, mapped.dataset.spec) == (own.key, own.state, own.dataset.spec)
    fingerprints = {
        fingerprint_of(data.spec, data.train, data.test) for data in (own.dataset, mapped.dataset)
    }
    assert len(fingerprints) == 1
    with pytest.raises(ValueError, match="read-only"):
        mapped.dataset.train.labels[0] = 1
    samples = [
        data.train.subset([3, 1]).to_samples(data.spec) for data in (own.dataset, mapped.dataset)
    ]
    assert torch.equal(samples[0].inputs, samples[1].inputs)


def test_a_spec_that_would_not_be_the_same_is_not_shared(tmp_path):
    digits = load_dataset("digits")
    spec = DataSpec("digits", (1, 8, 8), 10, (np.float64(0.5),), (0.5,))
    own = read(Dataset(spec, digits.train, digits.test))
    assert write_dataset(own, SharedArrays(tmp_path, "a"), tmp_path) is None
    assert not list(tmp_path.iterdir())


class Mirrored(RawSamples):
    """Samples that a plug-in gives out otherwise than they are stored."""

    def subset(self, indices):
        """Those at these places, mirrored."""
        plain = super().subset(indices)
        return RawSamples(plain.images[..., ::-1], plain.labels)


def test_samples_of_a_class_of_a_plug_in_are_not_shared(tmp_path):
    digits = load_dataset("digits")
    train = Mirrored(digits.train.images, digits.train.labels)
    own = read(Dataset(digits.spec, train, digits.test))
    assert write_dataset(own, SharedArrays(tmp_path, "a"), tmp_path) is None


def test_a_data_set_for_which_there_is_no_room_is_not_shared(tmp_path):
    images = np.broadcast_to(np.uint8(0), (10**12, 1, 8, 8))
    parts = RawSamples(images, np.broadcast_to(np.int64(0), 10**12)), load_dataset("digits").test
    own = read(Dataset(load_dataset("digits").spec, *parts))
    assert write_dataset(own, SharedArrays(tmp_path, "a"), tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_data_that_nodes_have_of_their_own_are_not_read():
    assert read_dataset(TaskSettings(dataset="private")) is None


@pytest.mark.slow
@pytest.mark.parametrize("fork", [True, False])
def test_only_the_server_reads_the_data_set(tmp_path, monkeypatch, fork):
    monkeypatch.setattr(workers, "can_fork", lambda: fork and can_fork())
    readers = tmp_path / "readers"
    monkeypatch.setenv("FLWR_DISTILL_TEST_READERS", str(readers))
    monkeypatch.setattr(f"{__name__}.READERS", readers)
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2])
    config = {
        "dataset": "tests.simulation.test_dataset:digits_of",
        "data-root": str(tmp_path / "data"),
        "model": "digits-cnn",
        "strategy": "fedavg",
        "num-rounds": 1,
        "server-device": "cpu",
    }
    nodes = on_devices([{"num-partitions": 3, "device": "cpu"}] * 3, "cpu")
    simulate(config, nodes, tmp_path / "runs", workers=2)
    assert readers.read_text().split() == [str(os.getpid())]
