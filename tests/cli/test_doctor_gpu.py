"""The doctor's test of a GPU: what is timed and found, on GPUs that are not there."""

import pytest
import torch

import flwr_distill.fleet.checkup
import flwr_distill.fleet.gpu_speed
from flwr_distill.fleet.checkup import checkup
from flwr_distill.node.settings import load_settings


@pytest.fixture(autouse=True)
def little_work(monkeypatch):
    """Little work, for a virtual GPU computes on the CPU; with the peaks of an H100."""
    sizes = {"MATRIX": 32, "IMAGES": 2, "CHANNELS": 3, "SIDE": 8}
    sizes |= {"VIRTUAL": 20, "REAL": 16, "PIXELS": 48}
    for name, size in sizes.items():
        monkeypatch.setattr(flwr_distill.fleet.gpu_speed, name, size)
    (peaks,) = flwr_distill.fleet.gpu_speed.PEAKS.values()
    monkeypatch.setattr(flwr_distill.fleet.gpu_speed, "PEAKS", {"virtual GPU": peaks})
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    monkeypatch.setattr(flwr_distill.fleet.checkup, "SERVER_PORTS", {})
    monkeypatch.setattr(flwr_distill.fleet.checkup, "PEER_PORT", 0)
    monkeypatch.setattr(flwr_distill.fleet.gpu_speed.time_gpu, "__kwdefaults__", {"seconds": 0.02})


def gpus(**settings):
    findings = checkup(load_settings(None, settings))
    return {finding.check: finding for finding in findings if finding.check.startswith("cuda")}


def test_every_gpu_is_timed_beside_the_floor_of_its_hardware(virtual_device):
    with virtual_device(2):
        findings = gpus(device="cuda")
    assert [*findings] == ["cuda:0", "cuda:1"]
    for name in findings:
        assert findings[name].state == "ok", findings[name]
        assert "virtual GPU, 80.0 GiB, 80.0 GiB free; matmul " in findings[name].found
        numbers = findings[name].numbers
        for work in ("matmul", "conv", "KIP step"):
            assert numbers[f"{work} (s)"] > numbers[f"{work}, floor (s)"] > 0
        product = 3 * 32 * 32 * 4 / 3.35e12  # bound by memory at this size
        assert numbers["matmul, floor (s)"] == pytest.approx(product)


def test_a_gpu_without_known_peaks_has_times_and_no_floor(virtual_device, monkeypatch):
    monkeypatch.setattr(flwr_distill.fleet.gpu_speed, "PEAKS", {})
    with virtual_device():
        findings = gpus()["cuda:0"]
    assert findings.state == "ok"
    assert "floor" not in str(findings)


def test_a_gpu_that_computes_nonsense_fails(virtual_device, monkeypatch):
    nothing = float("nan")
    monkeypatch.setattr(
        flwr_distill.fleet.gpu_speed.functional, "conv2d", lambda images, *_, **__: images * nothing
    )
    with virtual_device():
        findings = gpus()["cuda:0"]
    assert findings.state == "failed"
    assert "conv: the result is not finite" in findings.found
