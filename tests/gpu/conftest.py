"""A GPU to test, virtual or real, and small work for it."""

from functools import partial
from types import SimpleNamespace

import pytest

from benchmarks.gpu_work import noting
from benchmarks.in_process import run_in_process
from flwr_distill.client.local_data import local_data
from flwr_distill.client.training import train_round
from flwr_distill.task.compute import memory_format
from flwr_distill.task.compute.precision import products_in
from flwr_distill.task.models import create_model
from flwr_distill.task.settings import TrainSettings
from tests.gpu import work
from tests.gpu.work import GPU, SPEC, Place, generator, samples


@pytest.fixture(autouse=True)
def one_memory_format(monkeypatch):
    """The CPU computes as a virtual GPU does, to the last bit: never with channels last."""
    monkeypatch.setattr(memory_format, "_is_faster_with_channels_last", lambda model: False)


@pytest.fixture
def gpus(virtual_device):
    """Two virtual GPUs."""
    with virtual_device(2) as gpus:
        yield gpus
    local_data.cache_clear()  # holds a node's data, on the GPU


@pytest.fixture(params=["virtual", pytest.param("real", marks=pytest.mark.gpu)])
def gpu(request):
    """A GPU whose results are compared with the CPU's: a virtual one, and a real one."""
    if request.param == "virtual":
        yield Place(GPU, request.getfixturevalue("gpus"))
        return
    with products_in("float32"):  # as the node's app does
        yield Place(work.REAL_GPU)
    local_data.cache_clear()


@pytest.fixture
def federation(tmp_path_factory):
    """Run a federation of two small nodes in this process; returns accuracy and loss by round."""

    def run(device, server_device=None, partitions=40, **settings):
        failures = []

        config = {
            "num-rounds": 2,
            "train.local-epochs": 1,
            "phase-timeout": 20.0,
            "server-device": server_device or device,
            **{name.replace("__", ".").replace("_", "-"): v for name, v in settings.items()},
        }
        node = {"num-partitions": partitions, "device": device}
        rows = run_in_process(
            config, [node] * 2, tmp_path_factory.mktemp("run"), wrap=partial(noting, failures)
        )
        if failures:
            raise failures[0]
        return [(row["accuracy"], row["loss"]) for row in rows]

    return run


@pytest.fixture
def step(gpus):
    """Measure a step of a job, a function of the number of steps.

    It is the difference between more steps and fewer: what is done once does not count.
    """

    def measure(job, fewer=2, more=4):
        accounts = []
        for steps in (fewer, more):
            with gpus.measured() as used:
                job(steps)
            accounts.append(used)
        used = accounts[1] - accounts[0]
        return SimpleNamespace(
            launches=used.launches / (more - fewer),
            waits=used.waits / (more - fewer),
            copies=used.copies / (more - fewer),
            where={kind: used.lines(kind)[:9] for kind in ("launch", "wait", "copy")},
        )

    return measure


@pytest.fixture
def training_step(step):
    """Measure a step of local training, with a loss term that is made of the model."""

    def measure(term=None, place_of_data=GPU, changes=()):
        data = samples(64).to(place_of_data)

        def job(steps):
            model = create_model("digits-cnn", SPEC, seed=0).to(GPU)
            settings = TrainSettings.checked({"local-epochs": 1, "batch-size": 16}, "test")
            terms = [] if term is None else [term(model)]
            part = data.subset(range(16 * steps))
            train_round(model, part, settings, generator(), changes=changes, terms=terms)

        return step(job)

    return measure
