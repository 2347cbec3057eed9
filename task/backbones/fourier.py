"""Random Fourier features, with which a linear head is one of a kernel."""

import math

import torch
from torch import Tensor, nn


class RandomFourier(nn.Module):
    """``cos(W x + b)`` with random W and b (Rahimi and Recht 2007).

    Products of features approximate ``exp(-|x - y|^2 / 2 reach^2)``, times half their number.

    Parameters
    ----------
    inputs, width : int
        Numbers of an input, and features.
    reach : float, optional (default: None)
        Distance at which inputs count as far apart; None for the root of `inputs`, which suits
        numbers of variance 1.
    """

    def __init__(self, inputs: int, width: int, reach: float | None = None) -> None:
        super().__init__()
        self.waves = nn.Parameter(torch.randn(width, inputs) / (reach or math.sqrt(inputs)))
        self.phases = nn.Parameter(2 * math.pi * torch.rand(width))

    def forward(self, inputs: Tensor) -> Tensor:
        """Features (n, width) of inputs (n, ...)."""
        return torch.cos(nn.functional.linear(inputs.flatten(1), self.waves, self.phases))
