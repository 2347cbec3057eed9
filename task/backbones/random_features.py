"""Random Fourier features of the pixels: a backbone that needs no file, for small images."""

import math

from torch import nn

from task.backbones.fourier import RandomFourier
from task.backbones.frozen import Frozen
from task.datasets.types import DataSpec
from task.models.registry import register

WIDTH = 1024


@register("random-features", fits=lambda spec: spec.kind != "text")
def random_features(spec: DataSpec) -> nn.Module:
    """1,024 random Fourier features, drawn from the run's seed, and a linear head."""
    return Frozen(RandomFourier(math.prod(spec.shape), WIDTH), WIDTH, spec)
