"""Low-rank updates: what they start as, what trains, and that nodes' averages are exact."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flwr_distill.task.backbones import Frozen, copy_to_train, fingerprint
from flwr_distill.task.backbones.low_rank import LowRank
from flwr_distill.task.datasets import DataSpec
from flwr_distill.task.errors import ModelError
from flwr_distill.task.models.checks import why_not_private, why_private_step_fails
from tests.errors import at

SPEC = DataSpec("some", (1, 12, 12), 4, (0.5,), (0.25,))


class Network(nn.Module):
    """A convolution, one with groups, one that pads in its own way, attention and dense layers.

    Of the layer `read` it reads the weights, as torchvision's Swin and timm's BEiT do.
    """

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, stride=2)
        self.grouped = nn.Conv2d(8, 8, 3, groups=8)
        self.padded = Padded(8, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.read = nn.Linear(6, 6)
        self.dense = nn.Linear(6, 5)

    def forward(self, images):
        found = self.norm(self.padded(self.grouped(self.conv(images).relu()).relu()))
        sequence = found.flatten(2).transpose(1, 2)
        sequence = nn.functional.linear(sequence, self.read.weight, self.read.bias)
        return self.dense(self.attention(sequence, sequence, sequence)[0].mean(1))


class Padded(nn.Conv2d):
    """As packages make them: the padding is in ``forward``."""

    def forward(self, inputs):
        return super().forward(nn.functional.pad(inputs, (1, 1, 1, 1)))


@pytest.fixture
def adapted():
    """A frozen network before and after it got updates of rank 2."""
    torch.manual_seed(0)
    plain = Frozen(Network(), 5, SPEC)
    model = copy.deepcopy(plain)
    model.adapt(2)
    return plain, model


def trained(model):
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


def test_updates_start_at_nothing_and_train_without_the_network(adapted):
    plain, model = adapted
    images = torch.randn(3, *SPEC.shape)
    torch.testing.assert_close(model(images), plain(images))
    layers = ("conv", "padded", "dense")  # without groups, and whose weights nobody reads
    updates = {f"network.{layer}.up.weight" for layer in layers}
    assert trained(model) == model.state_dict().keys() == {"head.weight", "head.bias"} | updates
    before = fingerprint(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        model(images).square().sum().backward()
        optimizer.step()
    assert all(weight.abs().sum() > 0 for weight in model.state_dict().values())
    for name, value in plain.network.state_dict().items():
        layer, _, rest = name.partition(".")
        kept = model.network.state_dict()[f"{layer}.layer.{rest}" if layer in layers else name]
        assert torch.equal(kept, value), name
    changed = copy.deepcopy(model)
    changed.network.dense.down.weight.data += 1
    assert fingerprint(changed) != fingerprint(model) != before


@given(
    seed=st.integers(0, 2**31 - 1),
    layer=st.sampled_from(["dense", "conv", "padded"]),
    shares=st.lists(st.floats(0.05, 1), min_size=2, max_size=5),
)
def test_the_mean_of_updates_is_the_update_of_the_mean(seed, layer, shares):
    """What averages of both factors miss (Sun et al. 2024): A is the same for all."""
    torch.manual_seed(seed)
    network = Network().eval()
    inputs = {"dense": (6,), "conv": (1, 12, 12), "padded": (8, 5, 5)}[layer]
    low_rank, given = LowRank(getattr(network, layer), 3), torch.randn(4, *inputs)
    weights = torch.tensor(shares) / sum(shares)
    ups = [torch.randn_like(low_rank.up.weight) for _ in shares]
    with torch.no_grad():
        outputs = []
        for up in ups:
            low_rank.up.weight.copy_(up)
            outputs.append(low_rank(given))
        low_rank.up.weight.copy_(sum(w * up for w, up in zip(weights, ups, strict=True)))
        mean = sum(w * output for w, output in zip(weights, outputs, strict=True))
        torch.testing.assert_close(low_rank(given), mean, atol=1e-4, rtol=1e-4)


def test_a_first_step_moves_outputs_as_far_as_a_step_of_the_layer_itself():
    """So one learning rate suits both; a mean over draws, since a single A projects at random."""
    torch.manual_seed(0)
    layer, inputs, targets = nn.Linear(200, 30), torch.randn(16, 200), torch.randn(16, 30)
    moved = []
    for model in (copy.deepcopy(layer), *(LowRank(layer, 8) for _ in range(40))):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        before = model(inputs)
        (before * targets).sum().backward()
        if isinstance(model, nn.Linear):
            model.bias.grad = None
        optimizer.step()
        moved.append((model(inputs) - before).detach())
    torch.testing.assert_close(
        (torch.stack(moved[1:]).mean(0) * moved[0]).sum() / moved[0].square().sum(),
        torch.tensor(1.0),
        atol=0.1,
        rtol=0,
    )


def test_a_network_without_a_wider_layer_is_an_error():
    with pytest.raises(ModelError, check=at("backbone.rank", value=9)):
        Frozen(Network(), 5, SPEC).adapt(9)


class Standardised(nn.Conv2d):
    """Standardises its weights by output, as timm's networks of BiT do."""

    def forward(self, images):
        weight = nn.functional.layer_norm(self.weight.view(self.out_channels, -1), (49,))
        return nn.functional.conv2d(images, weight.view_as(self.weight)).mean((2, 3))


def test_a_network_whose_layers_take_no_updates_is_an_error():
    with pytest.raises(ModelError, check=at("backbone.trains", value="lora")):
        Frozen(nn.Sequential(Standardised(1, 6, 7)), 6, SPEC).adapt(2)


def test_updates_train_with_differential_privacy(adapted):
    _, model = adapted
    assert not why_not_private(model)
    assert not why_private_step_fails(model, SPEC)


def test_copies_to_train_share_the_frozen_layers(adapted):
    _, model = adapted
    copied = copy_to_train(model)
    own, theirs = dict(model.named_parameters()), dict(copied.named_parameters())
    assert {name for name in own if own[name] is not theirs[name]} == trained(model)
    assert copied.network.norm.running_mean is model.network.norm.running_mean
