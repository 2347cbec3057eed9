"""An architecture of a node's own, with as many features as the run's."""

from torch import nn


def SixtyFour(spec):  # noqa: N802
    channels, height, width = spec.shape
    return nn.Sequential(
        nn.Flatten(), nn.Linear(channels * height * width, 64), nn.ReLU(), nn.Linear(64, 10)
    )
