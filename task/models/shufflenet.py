"""ShuffleNet (Zhang et al. 2018); torchvision has its second version only."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from flwr_distill.task.datasets.types import DataSpec
from flwr_distill.task.models.registry import register

GROUPS = 3
STEM = 24
STAGES = ((240, 4), (480, 8), (960, 4))
"""Channels and units of each stage, for three groups at width 1 (table 1 of the paper)."""
SMALL = 32
"""Side up to which an image keeps its size in the stem."""


class ShuffleUnit(nn.Module):
    """1x1 convolution in groups, shuffled channels, 3x3 a channel, 1x1 in groups, and a shortcut.

    Where the channels grow, the unit halves the image, and the shortcut is an average that is
    joined to the result instead of added. The very first 1x1 convolution has no groups: its 24
    channels are too few for them.
    """

    def __init__(self, before: int, width: int, groups_of_first: int = GROUPS) -> None:
        super().__init__()
        inner = width // 4
        self.halves = before != width
        added = width - before if self.halves else width
        stride = 2 if self.halves else 1
        self.first = nn.Conv2d(before, inner, 1, groups=groups_of_first, bias=False)
        self.first_norm = nn.BatchNorm2d(inner)
        self.second = nn.Conv2d(inner, inner, 3, stride, padding=1, groups=inner, bias=False)
        self.second_norm = nn.BatchNorm2d(inner)
        self.third = nn.Conv2d(inner, added, 1, groups=GROUPS, bias=False)
        self.third_norm = nn.BatchNorm2d(added)

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, before, H, W) to (n, width, H, W), or of half the size, rounded up."""
        inner = shuffled(functional.relu(self.first_norm(self.first(x))), GROUPS)
        inner = self.third_norm(self.third(self.second_norm(self.second(inner))))
        if not self.halves:
            return functional.relu(x + inner)
        shortcut = functional.avg_pool2d(x, 3, stride=2, padding=1)
        return functional.relu(torch.cat([shortcut, inner], dim=1))


def shuffled(x: Tensor, groups: int) -> Tensor:
    """Channels (n, c, H, W) of all groups in turn, so that the next group sees each of them."""
    return x.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)


@register("shufflenet-v1", fits=lambda spec: spec.kind == "image")
def shufflenet_v1(spec: DataSpec) -> nn.Module:
    """ShuffleNet 1x with three groups; up to 32x32 with a stem of stride 1 without pooling."""
    small = max(spec.shape[1:]) <= SMALL
    layers: list[nn.Module] = [
        nn.Conv2d(spec.shape[0], STEM, 3, 1 if small else 2, padding=1, bias=False),
        nn.BatchNorm2d(STEM),
        nn.ReLU(),
        nn.Identity() if small else nn.MaxPool2d(3, stride=2, padding=1),
    ]
    before = STEM
    for width, units in STAGES:
        for _ in range(units):
            layers.append(ShuffleUnit(before, width, 1 if before == STEM else GROUPS))
            before = width
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, spec.num_classes))
    return nn.Sequential(*layers, *head)
