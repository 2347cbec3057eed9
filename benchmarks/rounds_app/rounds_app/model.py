"""The model for digits, built by both sides."""

from torch import nn


def build_model() -> nn.Module:
    """A small CNN for digits of 1 x 8 x 8."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(1024, 10),
    )
