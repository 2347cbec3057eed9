"""The model of the work on digits, which both sides build."""

from torch import nn


def build_model() -> nn.Module:
    """Return a small CNN for digits of 1 x 8 x 8."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(1024, 10),
    )
