"""The device that a process computes on."""

import pytest
import torch

from flwr_distill.task.compute.device import choose_device, describe_device, place
from flwr_distill.task.compute.precision import forward_in, products_in
from flwr_distill.task.datasets import Samples
from flwr_distill.task.errors import SettingsError
from tests.errors import at

CPU = torch.device("cpu")


@pytest.fixture
def broken_gpu(monkeypatch):
    """A GPU that is counted and cannot be used, as with an old driver."""
    zeros = torch.zeros

    def refuse(*shape, device=None, **others):
        if torch.device(device or "cpu").type == "cuda":
            raise RuntimeError("CUDA error: no kernel image is available")
        return zeros(*shape, device=device, **others)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch, "zeros", refuse)


def test_without_a_gpu_auto_takes_the_cpu_and_cuda_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", "server-device") == CPU
    assert describe_device(CPU) == "cpu"
    with pytest.raises(SettingsError, match="no CUDA", check=at("device", value="cuda")):
        choose_device("cuda", "device")


def test_auto_takes_the_cpu_if_the_gpu_cannot_be_used_and_warns(broken_gpu, caplog):
    assert choose_device("auto", "server-device") == CPU
    assert "server-device = 'auto' takes the CPU: it cannot be used: CUDA error" in caplog.text


@pytest.mark.parametrize(
    ("name", "reason"),
    [("cuda:0", "no kernel image"), ("cuda:1", "1 CUDA devices"), ("gpu", "cpu, cuda or cuda:N")],
)
def test_an_unusable_device_is_an_error_with_the_reason(broken_gpu, name, reason):
    with pytest.raises(SettingsError, match=reason, check=at("server-device", value=name)):
        choose_device(name, "server-device")


@pytest.mark.parametrize(("free", "stays"), [(799, True), (800, False)])
def test_samples_that_fill_over_half_of_a_gpus_free_memory_stay_in_main_memory(
    monkeypatch, caplog, free, stays
):
    moved = []
    samples = Samples(torch.zeros(10, 1, 2, 4), torch.zeros(10, dtype=torch.int64))  # 400 bytes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10**9))
    monkeypatch.setattr(Samples, "to", lambda self, device: moved.append(device))
    placed = place(samples, torch.device("cuda", 1))
    assert (placed is samples) == stays
    assert len(moved) == (not stays)
    assert ("stay in main memory" in caplog.text) == stays


def test_products_have_the_asked_precision_within_the_block_and_the_former_one_after():
    def allowed():
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32

    before = allowed()
    with products_in("float32"):
        assert allowed() == (False, False)
        with products_in("tf32"):
            assert allowed() == (True, True)
        assert allowed() == (False, False)
        with products_in("bf16"):
            assert allowed() == (False, False)
    assert allowed() == before


def test_only_bf16_changes_the_type_of_a_forward_pass():
    x = torch.ones(2, 2)
    for precision, dtype in [
        ("float32", torch.float32),
        ("tf32", torch.float32),
        ("bf16", torch.bfloat16),
    ]:
        forward = forward_in(precision, CPU)
        for _ in range(2):
            with forward:
                assert (x @ x).dtype == dtype
        assert (x @ x).dtype == torch.float32
