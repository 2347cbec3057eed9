"""Arrays that memory would not hold are in files, and are the same."""

import errno
import mmap
import os
import subprocess
import sys
import tempfile

import numpy as np
import pytest
import torch
from PIL import Image

from flwr_distill.task import large_arrays
from flwr_distill.task.datasets import DatasetError
from flwr_distill.task.large_arrays import empty, joined, stacked
from tests.errors import at


@pytest.fixture(params=["in memory", "in a file"])
def place(request, monkeypatch):
    if request.param == "in a file":
        monkeypatch.setattr(large_arrays, "memory", lambda: 1000)
    return request.param


def is_mapped(array):
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(getattr(array, "obj", array), mmap.mmap)


def test_images_are_stacked_alike_in_memory_and_in_a_file(place):
    generator = np.random.default_rng(0)
    small = [generator.integers(0, 256, (3, 8, 8), np.uint8) for _ in range(5)]
    deep = [generator.random((3, 8, 8), np.float32) for _ in range(5)]
    np.testing.assert_array_equal(stacked(small), np.stack(small))
    np.testing.assert_array_equal(stacked(deep), np.stack(deep))
    mixed = [small[0], deep[0], small[1]]
    expected = np.stack([small[0] / np.float32(255), deep[0], small[1] / np.float32(255)])
    np.testing.assert_array_equal(stacked(mixed), expected)
    assert is_mapped(stacked(small)) == (place == "in a file")


def test_tensors_are_joined_alike_in_memory_and_in_a_file(place):
    parts = [torch.rand(7, 3, 8, 8), torch.rand(2, 3, 8, 8)]
    assert torch.equal(joined(parts), torch.cat(parts))


def test_no_room_on_the_disk_names_the_folder_and_the_remedy(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(large_arrays, "memory", lambda: 1000)
    monkeypatch.setattr(large_arrays, "_reserve", full)
    with pytest.raises(DatasetError, match="TMPDIR", check=at(tempfile.gettempdir())):
        empty((100, 3, 8, 8), np.float32)


LIMITED = """
import resource, sys
import torch
from flwr_distill.client.training import train_round
from flwr_distill.task import large_arrays
from flwr_distill.task.datasets import DataSpec, load_private_data
from flwr_distill.task.settings import TrainSettings

large_arrays.memory = lambda: 400_000_000
kept = [int(line.split()[1]) << 10 for line in open("/proc/self/status") if "VmData" in line]
limit = kept[0] + 350_000_000  # mappings of files do not count
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
spec = DataSpec("private", (3, 512, 512), 2, (0.5,) * 3, (0.25,) * 3)
raw = load_private_data(sys.argv[1], spec)
samples = raw.to_samples(spec, torch.randperm(len(raw), generator=torch.Generator().manual_seed(0)))
model = torch.nn.Sequential(torch.nn.AvgPool2d(128), torch.nn.Flatten(), torch.nn.Linear(48, 2))
settings = TrainSettings.checked({"local-epochs": 1, "batch-size": 8, "lr": 0.1}, "a test")
trained = train_round(model, samples, settings, torch.Generator().manual_seed(0))
print(samples.inputs.nbytes, trained.accuracy)
"""


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_the_whole_file_of_an_array_is_reserved_on_every_system(monkeypatch, tmp_path, platform):
    monkeypatch.setattr(sys, "platform", platform)
    size = (1 << 20) + 5
    with (tmp_path / "array").open("w+b") as file:
        large_arrays._reserve(file, size)
        status = os.fstat(file.fileno())
    assert status.st_size == size
    assert status.st_blocks * 512 >= size  # no hole that a full disk could not fill


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
def test_a_node_trains_on_three_times_the_images_that_fit_into_its_memory(tmp_path):
    for label, level in (("dark", 60), ("light", 190)):
        (tmp_path / label).mkdir()
        for number in range(150):
            image = Image.new("RGB", (512, 512), (level + number % 40,) * 3)
            image.save(tmp_path / label / f"{number}.png", compress_level=1)
    ended = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ended.returncode == 0, ended.stderr
    size, accuracy = ended.stdout.split()
    assert int(size) == 300 * 3 * 512 * 512 * 4
    assert float(accuracy) > 0.8
