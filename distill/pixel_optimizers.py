"""Optimisers of the pixels of virtual images."""

import torch
from torch import Tensor

from flwr_distill.task.settings import ImageOptimizer

SGD_RATE = 1.0
SGD_MOMENTUM = 0.5
"""Of the published codes of distribution matching, dataset condensation and FedLGD."""


def pixel_optimizer(kind: ImageOptimizer, images: Tensor, lr: float) -> torch.optim.Optimizer:
    """Adam at the rate `lr`, or the published codes' SGD, which has a rate of its own."""
    if kind == "adam":
        return torch.optim.Adam([images], lr=lr)
    return torch.optim.SGD([images], lr=SGD_RATE, momentum=SGD_MOMENTUM)
