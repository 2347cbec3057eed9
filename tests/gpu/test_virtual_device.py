"""The GPU that is not there behaves as one that is, as far as PyTorch's documentation says."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks.virtual_device import VirtualDevice
from flwr_distill.node.compiler import PutOff

INPUTS = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 0, 1])


def convnet():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)
        )


def trained(model, inputs, labels):
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return model


def test_training_gives_the_values_of_the_cpu(gpus):
    on_cpu = trained(convnet(), INPUTS, LABELS)
    model = convnet().to("cuda")
    on_gpu = trained(copy.deepcopy(model), INPUTS.to("cuda"), LABELS.cuda())
    for name, value in on_gpu.state_dict().items():
        assert value.device == torch.device("cuda:0")
        assert torch.equal(value.cpu(), on_cpu.state_dict()[name])
    assert all(isinstance(p, nn.Parameter) for p in on_gpu.parameters())


def test_a_module_moves_from_gpu_to_gpu_and_back_and_takes_other_types(gpus):
    model, expected = convnet().to("cuda:1"), convnet()
    for place in ("cuda:0", "cpu", "cuda:1"):
        model.to(place)
        assert {str(value.device) for value in model.state_dict().values()} == {place}
    model.double()
    for name, value in model.state_dict().items():
        assert torch.equal(value.cpu(), expected.double().state_dict()[name])


def test_gradients_of_gradients_and_vmap_give_the_values_of_the_cpu(gpus):
    def curvature(x):
        (gradient,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), x)[0]

    def slopes(x):
        return torch.func.vmap(torch.func.grad(lambda row: row.tanh().prod()))(x)

    for function in (curvature, slopes):
        values = INPUTS.flatten(1)
        on_gpu = function(values.to("cuda:1").requires_grad_())
        assert on_gpu.device == torch.device("cuda:1")
        assert torch.equal(on_gpu.cpu(), function(values.clone().requires_grad_()))


def test_packed_sequences_go_through_an_lstm(gpus):
    def last(device):
        torch.manual_seed(0)
        lstm = nn.LSTM(3, 4, batch_first=True).to(device)
        texts, lengths = torch.randn(2, 5, 3).to(device), torch.tensor([5, 3])
        packed = nn.utils.rnn.pack_padded_sequence(texts, lengths, batch_first=True)
        outputs, _ = nn.utils.rnn.pad_packed_sequence(lstm(packed)[0], batch_first=True)
        outputs.sum().backward()
        return outputs, lstm.weight_hh_l0.grad

    for on_gpu, on_cpu in zip(last("cuda:1"), last("cpu"), strict=True):
        torch.testing.assert_close(on_gpu.cpu(), on_cpu)  # the CPU takes oneDNN's LSTM


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (lambda x, cpu: x + cpu, "same device"),
        (lambda x, cpu: x.to("cuda:1") + x, "cuda:0 and cuda:1"),
        (lambda x, cpu: cpu.sum().add_(x.sum()), "same device"),
        (lambda x, cpu: torch.stack([x.sum(), torch.zeros(())]), "same device"),
        (lambda x, cpu: functional.cross_entropy(x.flatten(1), LABELS), "same device"),
        (lambda x, cpu: convnet().to("cuda")(cpu), "same device"),
        (lambda x, cpu: cpu[torch.tensor([0], device="cuda")], "same device"),
        (lambda x, cpu: torch.rand(3, device="cuda", generator=torch.Generator()), "'cuda' device"),
        (lambda x, cpu: torch.rand(3, generator=torch.Generator("cuda")), "'cpu' device"),
        (lambda x, cpu: x.bernoulli_(0.5, generator=torch.Generator()), "'cuda' device"),
        (lambda x, cpu: torch.zeros(2, device="cuda:2"), "invalid device ordinal"),
        (lambda x, cpu: cpu.to("cuda:2"), "invalid device ordinal"),
        (lambda x, cpu: torch.Generator("cuda").set_offset(2), "a multiple of 4"),
        (lambda x, cpu: x.numpy(), "can't convert cuda:0 device type tensor to numpy"),
    ],
)
def test_what_cuda_refuses_is_refused(gpus, refused, said):
    with pytest.raises((RuntimeError, TypeError), match=said):
        refused(INPUTS.to("cuda"), INPUTS.clone())


@pytest.mark.parametrize(
    "allowed",
    [
        lambda x: x * torch.tensor(2.0),
        lambda x: torch.tensor(2.0) * x,
        lambda x: x.masked_fill(x > 0, torch.tensor(1.0)),
        lambda x: x[torch.tensor([1, 2])],
        lambda x: x[[0, 2]],
        lambda x: x.clone().index_put_((torch.tensor([0]),), torch.tensor(3.0)),
        lambda x: torch.zeros(3, device="cuda:1").copy_(x[0, 0, 0, :3]),
        lambda x: torch.tensor([1, 2], device="cuda"),
        lambda x: torch.rand(3, device="cuda", generator=torch.Generator("cuda").manual_seed(1)),
    ],
)
def test_what_cuda_takes_is_taken(gpus, allowed):
    assert allowed(INPUTS.to("cuda")).is_cuda


@pytest.mark.parametrize(
    ("waits", "asked"),
    [
        (0, lambda x, y: (x * 2 + y).relu().sum()),
        (0, lambda x, y: x[:2, 0].clone().zero_()),
        (0, lambda x, y: x.index_select(0, y[0, 0, 0, :2].long() * 0)),
        (0, lambda x, y: torch.where(x > 0, x, y)),
        (0, lambda x, y: x.clone().__setitem__(x > 0, 0.0)),
        (0, lambda x, y: torch.empty(2).pin_memory().to("cuda", non_blocking=True)),
        (1, lambda x, y: torch.empty(2).to("cuda")),
        (1, lambda x, y: x.cpu()),
        (1, lambda x, y: x.tolist()),
        (1, lambda x, y: float(x.sum())),
        (1, lambda x, y: bool((x > 0).any())),
        (1, lambda x, y: x[x > 0]),
        (1, lambda x, y: x.clone().__setitem__(x > 0, y.mean())),
        (1, lambda x, y: (x > 0).nonzero()),
        (1, lambda x, y: x.unique()),
        (1, lambda x, y: x[torch.tensor([0, 1])]),
        (1, lambda x, y: torch.linalg.cholesky(torch.eye(3, device="cuda"))),
        (1, lambda x, y: torch.cuda.synchronize()),
    ],
)
def test_what_makes_the_host_wait_is_counted(gpus, waits, asked):
    x, y = INPUTS.to("cuda"), INPUTS.to("cuda")
    with gpus.measured() as used:
        asked(x, y)
    assert used.waits == waits, used.operations("wait")
    assert all(
        line.startswith("tests/gpu/test_virtual_device.py:") for line, _ in used.lines("wait")
    )


def test_launches_are_counted_with_the_line_that_asked_and_views_are_free(gpus):
    x = INPUTS.to("cuda")
    with gpus.measured() as used:
        x.flatten(1)[:, ::2].T.detach()
    assert used.launches == 0
    with gpus.measured() as used:
        (x + 1).exp()
        x.sum()
    assert used.launches == 3
    assert sorted(dict(used.operations("launch"))) == ["aten.add", "aten.exp", "aten.sum"]
    assert [count for _, count in used.lines("launch")] == [2, 1]


def test_a_launch_is_of_the_line_that_asked_where_the_compiler_is_put_off_too(gpus):
    x = INPUTS.to("cuda")
    kept_out = PutOff().disable(torch.exp, wrapping=False)  # as optimisers ask for their steps
    with gpus.measured() as used:
        kept_out(x)
    ((line, count),) = used.lines("launch")
    assert line.startswith("tests/gpu/test_virtual_device.py:")
    assert count == 1


def test_an_optimiser_steps_all_parameters_in_few_kernels(gpus):
    weights = [torch.ones(3, device="cuda", requires_grad=True) for _ in range(20)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    with gpus.measured() as used:
        torch.optim.SGD(weights, lr=0.1).step()
    assert used.launches == 1
    assert used.waits == 0


def test_a_block_that_is_measured_within_another_counts_for_both(gpus):
    x = INPUTS.to("cuda")
    with gpus.measured() as outer:
        x.sum()
        with gpus.measured() as inner:
            x.sum()
        x.sum()
    assert (outer.launches, inner.launches) == (3, 1)


def seen():
    """What a virtual GPU changes in PyTorch."""
    there = torch.cuda.is_available(), torch.cuda.device_count()
    return there, torch.Generator, nn.Module._apply, torch._C._only_lift_cpu_tensors()


def test_nothing_of_it_is_left_behind_not_by_an_error_either(virtual_device):
    before = seen()
    with virtual_device(3):
        x = torch.zeros(2, device="cuda")
    assert seen() == before
    with pytest.raises(RuntimeError, match="same device"), virtual_device(3):
        torch.zeros(2, device="cuda:2") + x
    assert seen() == before
    with pytest.raises(RuntimeError, match="outside of any VirtualDevice"):
        x + 1


def test_a_pytorch_that_cannot_have_it_is_named_and_unchanged(monkeypatch):
    monkeypatch.delattr(torch._C, "_ensureCUDADeviceGuardSet", raising=False)
    before = seen()
    with pytest.raises(RuntimeError, match=re.escape(torch.__version__)), VirtualDevice():
        pass
    assert seen() == before
