"""CADIS's network for MNIST."""

from torch import nn

from flwr_distill.task.datasets.types import DataSpec
from flwr_distill.task.models.registry import register


@register("cadis-mnist", fits=lambda spec: min(spec.shape[1:]) >= 4)
def cadis_mnist(spec: DataSpec) -> nn.Module:
    """5x5 convolutions (32, 64), each with ReLU and 2x2 max pooling, and a hidden layer of 512.

    The network of McMahan et al. (2017), with padded convolutions: 1,663,370 parameters on 1x28x28
    with ten classes.
    """
    height, width = (side // 4 for side in spec.shape[1:])
    return nn.Sequential(
        nn.Conv2d(spec.shape[0], 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * height * width, 512),
        nn.ReLU(),
        nn.Linear(512, spec.num_classes),
    )
