"""Random Fourier features of the pixels: a backbone that needs no file, for small images."""

import math

from torch import nn

from flwr_distill.task.backbones.frozen import Frozen
from flwr_distill.task.backbones.frozen import RandomFourier as RandomFourier  # re-exported
from flwr_distill.task.datasets.types import DataSpec
from flwr_distill.task.models.registry import register

WIDTH = 1024


@register("random-features", fits=lambda spec: spec.kind != "text")
def random_features(spec: DataSpec) -> nn.Module:
    """1,024 random Fourier features, drawn from the run's seed, and a linear head."""
    return Frozen(RandomFourier(math.prod(spec.shape), WIDTH), WIDTH, spec)
