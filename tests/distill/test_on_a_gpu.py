"""On a GPU, distillers start few kernels and check late; what they make is what a CPU makes."""

import pytest
import torch

from flwr_distill.distill import DistillError, kip
from flwr_distill.distill.kip import kip_gradient
from tests.distill.builders import distilled, normal, seeded
from tests.task import cpu_graphs

GPU = "cuda:1"


@pytest.fixture
def gpus(virtual_device):
    with virtual_device(2) as gpus:
        yield gpus


def run(name, device, n=30, **changes):
    images, labels = normal(n, 1, 8, 8), torch.arange(n) % 3
    return distilled(name, images, labels, steps=6, device=device, **changes)


@pytest.mark.parametrize("formation", [1, 2])
@pytest.mark.parametrize("name", ["dm", "kip"])
def test_recorded_steps_make_the_same_images(gpus, name, formation, monkeypatch):
    """With a bank of 40, DM would not use a network twice, nor record a step."""
    asked = {"dm": {"bank": 2}}.get(name, {}) | {"formation": formation}
    expected = run(name, GPU, **asked)
    graphs = cpu_graphs.install(monkeypatch)
    found = run(name, GPU, **asked)
    assert sum(graph.replays for graph in graphs) >= 3
    assert torch.equal(found.images, expected.images)


def kip_of_near_copies(device, **changes):
    """In float32 their kernel matrix is not positive definite."""
    images = normal(1, 1, 8, 8, seed=3)
    images = images + 1e-4 * normal(60, 1, 8, 8, seed=4)
    draws = seeded(5)
    asked = {"num_classes": 3, "per_class": 30, "init": "real", "steps": 4, "generator": draws}
    virtual = distilled("kip", images, torch.arange(60) % 2, device=device, **asked, **changes)
    return virtual.images, draws.get_state()


@pytest.mark.parametrize("asked", [{}, {"progress": lambda *told: None}])
def test_steps_that_need_float64_get_it_though_no_step_asks(gpus, asked, monkeypatch):
    factorised = []
    cholesky = torch.linalg.cholesky_ex

    def noting(system):
        factor, info = cholesky(system)
        factorised.append(not info.any())
        return factor, info

    monkeypatch.setattr(torch.linalg, "cholesky_ex", noting)
    expected = kip_of_near_copies("cpu")
    assert any(factorised)
    assert not all(factorised)
    for found, wanted in zip(kip_of_near_copies(GPU, **asked), expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("asked", [{}, {"progress": lambda *told: None}])
def test_divergence_is_an_error_though_cuda_does_not_tell_of_nan(gpus, asked, monkeypatch):
    cholesky = torch.linalg.cholesky_ex

    def as_on_cuda(system):
        factor, info = cholesky(system)
        broken = system.isnan().any(-1).any(-1)
        return factor.masked_fill(broken[..., None, None], torch.nan), info.masked_fill(broken, 0)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", as_on_cuda)
    kernel = kip.ntk

    def diverged(virtual, real=None):
        return kernel(virtual * torch.nan, real)

    monkeypatch.setattr(kip, "ntk", diverged)
    with pytest.raises(DistillError, match="lower learning rate"):
        run("kip", GPU, **asked)
    with pytest.raises(DistillError, match="lower learning rate"):
        kip_gradient(*(torch.full((2, 2), torch.nan),) * 4)
