"""A network of as many bytes as a benchmark needs, which trains fast for its size.

Nodes import it by name, so it imports nothing else of the benchmarks.
"""

import math
import os

from torch import Tensor, nn

from flwr_distill.task.datasets import DataSpec

MEGABYTES = "WIDE_NETWORK_MEGABYTES"
"""Environment variable for its size in float32."""
BRANCHES = 16


class WideNetwork(nn.Module):
    """Hidden layers side by side, of which the outputs are added."""

    def __init__(self, spec: DataSpec) -> None:
        super().__init__()
        inputs = math.prod(spec.shape)
        weights = int(os.environ[MEGABYTES]) * 1_000_000 // 4
        width = weights // BRANCHES // (inputs + spec.num_classes + 1)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, spec.num_classes))
            for _ in range(BRANCHES)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits of a batch of images, of shape (n, classes)."""
        images = images.flatten(1)
        return sum((branch(images) for branch in self.branches), start=images.new_zeros(()))
