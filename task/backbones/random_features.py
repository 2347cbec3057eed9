"""Random Fourier features of the pixels: a backbone that needs no file, for small images."""

import math

import torch
from torch import Tensor, nn

from task.backbones.frozen import Frozen
from task.datasets.types import DataSpec
from task.models.registry import register

WIDTH = 1024


class RandomFourier(nn.Module):
    """``cos(W x + b)`` with random W and b (Rahimi and Recht 2007).

    Products of features approximate ``exp(-|x - y|^2 / 2d)`` for inputs of d numbers, times half
    the number of features.
    """

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.waves = nn.Parameter(torch.randn(width, inputs) / math.sqrt(inputs))
        self.phases = nn.Parameter(2 * math.pi * torch.rand(width))

    def forward(self, images: Tensor) -> Tensor:
        """Features (n, width) of images (n, ...)."""
        return torch.cos(nn.functional.linear(images.flatten(1), self.waves, self.phases))


@register("random-features", fits=lambda spec: spec.kind != "text")
def random_features(spec: DataSpec) -> nn.Module:
    """1,024 random Fourier features, drawn from the run's seed, and a linear head."""
    return Frozen(RandomFourier(math.prod(spec.shape), WIDTH), WIDTH, spec)
