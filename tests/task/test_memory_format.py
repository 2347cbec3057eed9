"""On a CPU, convolutions compute with channels last, and nobody else notices."""

from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn import functional

from flwr_distill.client.training import fit
from flwr_distill.task.compute.memory_format import in_fast_format
from flwr_distill.task.datasets import Samples


def network(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), *middle, nn.Flatten(), nn.Linear(8 * 36, 4))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (network(nn.ReLU()), torch.channels_last),
        (network(nn.GroupNorm(4, 8)), torch.channels_last),
        (network(nn.GroupNorm(8, 8)), torch.contiguous_format),
        (network(nn.InstanceNorm2d(8)), torch.contiguous_format),
        (nn.Linear(3, 2), torch.contiguous_format),
        (network().to("meta"), torch.contiguous_format),
    ],
    ids=["convolutions", "groups", "channels", "instances", "dense", "another device"],
)
def test_models_with_convolutions_take_channels_last_unless_single_channels_are_normalised(
    model, expected
):
    with in_fast_format(model) as found:
        assert found == expected


def test_weights_lie_in_memory_as_before_whatever_happens():
    model, start = network(), network()
    with suppress(RuntimeError), in_fast_format(model):
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        raise RuntimeError
    assert model[0].weight.is_contiguous()
    assert torch.equal(model[0].weight, start[0].weight)


def test_training_gives_the_weights_of_a_plain_loop():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(20, 3, 8, 8, generator=generator)
    labels = torch.randint(4, (20,), generator=generator)
    batches = list(torch.arange(20).split(5)) * 3
    plain, ours = network(nn.ReLU()), network(nn.ReLU())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        functional.cross_entropy(plain(inputs[batch]), labels[batch]).backward()
        optimizer.step()
    fit(ours, Samples(inputs, labels), batches, torch.optim.SGD(ours.parameters(), lr=0.1))
    for own, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert own.is_contiguous()
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6)
