"""Features of models that know nothing of features."""

import torch
from torch import nn

from flwr_distill.client.terms import Features


def test_features_are_what_the_last_dense_layer_gets_and_are_part_of_the_graph():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 7), nn.ReLU(), nn.Linear(7, 3))
    features = Features(model)
    inputs = torch.randn(5, 1, 4, 4)
    logits = model(inputs)
    torch.testing.assert_close(features.last, model[:3](inputs))
    torch.testing.assert_close(model[3](model[:3](inputs)), logits)
    features.last.sum().backward()
    assert model[1].weight.grad.abs().sum() > 0


def test_another_dense_layer_can_be_named():
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 7), nn.ReLU(), nn.Linear(7, 3))
    features = Features(model, "1")
    inputs = torch.randn(5, 1, 4, 4)
    model(inputs)
    torch.testing.assert_close(features.last, inputs.flatten(1))
