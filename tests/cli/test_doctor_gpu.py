"""The doctor's test of a GPU: what is timed and found, on GPUs that are not there."""

from typing import Any

import pytest
import torch

import flwr_distill.fleet.checkup
import flwr_distill.fleet.gpu_speed
from benchmarks.virtual_device import VirtualDevice
from flwr_distill.fleet.checkup import Finding, checkup
from flwr_distill.node.settings import load_settings


@pytest.fixture(autouse=True)
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
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


def gpus(**settings: Any) -> dict[str, Finding]:
    found = checkup(load_settings(None, settings))
    return {finding.check: finding for finding in found if finding.check.startswith("cuda")}


def test_every_gpu_is_timed_beside_the_floor_of_its_hardware(
    virtual_device: type[VirtualDevice],
) -> None:
    with virtual_device(2):
        found = gpus(device="cuda")
    assert [*found] == ["cuda:0", "cuda:1"]
    for name in found:
        assert found[name].state == "ok", found[name]
        assert "virtual GPU, 80.0 GiB, 80.0 GiB free; matmul " in found[name].found
        numbers = found[name].numbers
        for work in ("matmul", "conv", "KIP step"):
            assert numbers[f"{work} (s)"] > numbers[f"{work}, floor (s)"] > 0
        product = 3 * 32 * 32 * 4 / 3.35e12  # bound by memory at this size
        assert numbers["matmul, floor (s)"] == pytest.approx(product)


def test_a_gpu_without_known_peaks_has_times_and_no_floor(
    virtual_device: type[VirtualDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flwr_distill.fleet.gpu_speed, "PEAKS", {})
    with virtual_device():
        found = gpus()["cuda:0"]
    assert found.state == "ok"
    assert "floor" not in str(found)


def test_a_gpu_that_computes_nonsense_fails(
    virtual_device: type[VirtualDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = float("nan")
    monkeypatch.setattr(
        flwr_distill.fleet.gpu_speed.functional, "conv2d", lambda images, *_, **__: images * nothing
    )
    with virtual_device():
        found = gpus()["cuda:0"]
    assert found.state == "failed"
    assert "conv: the result is not finite" in found.found
