"""Two GPUs that are not there, and small work for them."""

from collections.abc import Iterator

import pytest
import torch

from benchmarks.in_process import run_in_process
from client.session import _local_data
from tests.gpu.virtual_device import VirtualDevice

GPU = "cuda:1"
"""The second: what goes to the first by default is then found."""


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Sums depend on the number of threads in the last digit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def gpus() -> Iterator[VirtualDevice]:
    with VirtualDevice(2) as gpus:
        yield gpus
    _local_data.cache_clear()  # holds a node's data, on the GPU


@pytest.fixture
def federation(tmp_path_factory):
    """Run a federation of two small nodes in this process; returns accuracy and loss by round."""

    def run(device, **settings):
        failures = []

        def noting(place, node):
            def answer(message):
                try:
                    return node(message)
                except Exception as error:
                    failures.append(error)
                    raise

            return answer

        config = {
            "num-rounds": 2,
            "train.local-epochs": 1,
            "phase-timeout": 20.0,
            **{name.replace("__", ".").replace("_", "-"): v for name, v in settings.items()},
        }
        node = {"num-partitions": 20, "device": device}
        rows = run_in_process(config, [node] * 2, tmp_path_factory.mktemp("run"), wrap=noting)
        if failures:
            raise failures[0]
        return [(row["accuracy"], row["loss"]) for row in rows]

    return run
