"""A step as a CUDA graph gives what the step gives; where there can be none, the step runs."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from flwr_distill.task.compute.cuda_graph import graphed
from tests.task import cpu_graphs

CUDA = torch.device("cuda")


@dataclass(frozen=True, eq=False)
class Layer:
    weight: Tensor
    power: int


def step(layers: list[Layer], x: Tensor) -> tuple[Tensor, Tensor]:
    """A loss and its gradient, written to be awkward: in place, by autograd, in a loop."""
    leaf = x.detach().requires_grad_()
    total = torch.zeros((), device=x.device)
    for layer in layers:
        total += ((leaf @ layer.weight) ** layer.power).sum()
    (gradient,) = torch.autograd.grad(total, leaf)
    return total.detach(), gradient


def problem(seed, power=2, rows=4, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    weights = (torch.randn(3, 5, generator=generator).to(device) for _ in range(2))
    return [Layer(w, power) for w in weights], torch.randn(rows, 3, generator=generator).to(device)


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b)


@pytest.fixture
def graphs(monkeypatch):
    return cpu_graphs.install(monkeypatch)


def test_without_recording_a_step_runs_unchanged(virtual_device):
    assert graphed(step, torch.device("cpu")) is step
    with virtual_device(2):
        recorded = graphed(step, torch.device("cuda:1"))
        for seed in range(3):
            found = recorded(*problem(seed, device="cuda:1"))
            assert found[1].device == torch.device("cuda:1")
            assert_same(found, step(*problem(seed)))


def test_a_replay_gives_what_the_step_gives_and_other_forms_get_another_graph(graphs):
    recorded = graphed(step, CUDA)
    for seed in range(5):
        for form in ({}, {"power": 3}, {"rows": 6}):
            assert_same(recorded(*problem(seed, **form)), step(*problem(seed, **form)))
    assert [graph.replays for graph in graphs] == [4, 4, 4]


def test_results_can_be_the_next_arguments(graphs):
    def halved(weights: list[Tensor]) -> list[Tensor]:
        return [w / 2 for w in weights]

    recorded = graphed(halved, CUDA)
    weights = [torch.ones(2), torch.full((3,), 8.0)]
    for _ in range(6):
        weights = recorded(weights)
    assert weights[0].tolist() == [2**-6] * 2
    assert weights[1].tolist() == [2**-3] * 3
    assert graphs[0].replays == 5


def test_what_changes_in_place_outside_of_the_arguments_changes_once_a_call(graphs):
    """As the parameters of a model in training."""
    parameter = torch.zeros(2)
    recorded = graphed(lambda x: parameter.add_(x).sum(), CUDA)
    for number in range(4):
        recorded(torch.full((2,), 10.0**number))
    assert parameter.tolist() == [1111, 1111]


def test_a_step_that_cannot_be_recorded_runs_as_it_is_ever_after(graphs):
    calls = []

    def waiting(x: Tensor) -> Tensor:
        calls.append(1)
        return x * float(x.sum())

    recorded = graphed(waiting, CUDA)
    for number in range(4):
        x = torch.full((2,), float(number))
        assert torch.equal(recorded(x), x * 2 * number)
    assert len(calls) == 4 + 1  # and once in vain
    # Until a recording succeeds, PyTorch 2.11 draws no random numbers on this GPU.
    assert [graph.ended for graph in graphs] == [False, True]


def test_a_recording_that_fails_leaves_the_current_stream_and_no_trace_in_later_errors(graphs):
    """An error of CUDA behind another one would make a node replace its worker."""

    def failing(x: Tensor) -> Tensor:
        if graphs and not x.any():
            raise ValueError("the step's own")
        return x * float(x.sum())

    stream = torch.cuda.current_stream()
    recorded = graphed(failing, CUDA)
    recorded(torch.ones(2))
    with pytest.raises(ValueError, match="the step's own") as error:
        recorded(torch.zeros(2))
    assert error.value.__context__ is None
    assert torch.cuda.current_stream() is stream
