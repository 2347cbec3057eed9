"""FedLGD's ConvNet-3 with group norm; its other network, ResNet-18, is torchvision's."""

from torch import nn

from flwr_distill.task.datasets.types import DataSpec
from flwr_distill.task.models.papers import convnet
from flwr_distill.task.models.registry import register

GROUPS = 4


@register("convnet3-gn", fits=lambda spec: spec.kind == "image" and min(spec.shape[1:]) >= 8)
def convnet3_gn(spec: DataSpec) -> nn.Module:
    """ConvNet-3 with group norm of 4 groups, 128 filters; 320,010 parameters on 3x32x32."""
    return convnet(spec, filters=128, groups=GROUPS)


@register("convnet3-gn32", fits=lambda spec: spec.kind == "image" and min(spec.shape[1:]) >= 8)
def convnet3_gn32(spec: DataSpec) -> nn.Module:
    """The same with 32 filters, for machines without a GPU."""
    return convnet(spec, filters=32, groups=GROUPS)
