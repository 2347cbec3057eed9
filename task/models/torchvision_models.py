"""Torchvision's networks with the dataset's channels and classes.

On images up to 32x32 the first convolution has stride 1 and there is no pooling after it: the usual
stem would shrink such images to a few pixels. Torchvision is slow to import, so each function
imports it.
"""

from torch import nn

from flwr_distill.task.datasets.types import DataSpec
from flwr_distill.task.models.registry import register


@register("resnet18", fits=lambda spec: spec.kind == "image")
def resnet18(spec: DataSpec) -> nn.Module:
    """ResNet-18; up to 32x32 with a 3x3 stem of stride 1."""
    from torchvision.models import resnet18 as build

    model: nn.Module = build(num_classes=spec.num_classes)
    if _is_small(spec):
        model.conv1 = nn.Conv2d(spec.shape[0], 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    else:
        model.conv1 = nn.Conv2d(spec.shape[0], 64, 7, stride=2, padding=3, bias=False)
    return model


@register("fedlgd-resnet18", fits=lambda spec: spec.kind == "image")
def fedlgd_resnet18(spec: DataSpec) -> nn.Module:
    """ResNet-18 of FedLGD's table 8: a 7x7 stem of stride 2 for images of any size, no max pooling.

    Where widths of batch normalisation in the table do not fit their convolutions, they are those
    of ResNet-18. 11,181,642 parameters on colour images with ten classes.
    """
    from torchvision.models import resnet18 as build

    model: nn.Module = build(num_classes=spec.num_classes)
    model.conv1 = nn.Conv2d(spec.shape[0], 64, 7, stride=2, padding=3, bias=False)
    model.maxpool = nn.Identity()
    return model


@register("mobilenetv2", fits=lambda spec: spec.kind == "image")
def mobilenetv2(spec: DataSpec) -> nn.Module:
    """MobileNetV2; up to 32x32 with a stem of stride 1."""
    from torchvision.models import mobilenet_v2

    model: nn.Module = mobilenet_v2(num_classes=spec.num_classes)
    stride = 1 if _is_small(spec) else 2
    stem = nn.Conv2d(spec.shape[0], 32, 3, stride, padding=1, bias=False)
    model.set_submodule("features.0.0", stem)
    return model


@register("shufflenet", fits=lambda spec: spec.kind == "image")
def shufflenet(spec: DataSpec) -> nn.Module:
    """ShuffleNetV2 x1.0; up to 32x32 with a stem of stride 1."""
    from torchvision.models import shufflenet_v2_x1_0

    model: nn.Module = shufflenet_v2_x1_0(num_classes=spec.num_classes)
    stride = 1 if _is_small(spec) else 2
    stem = nn.Conv2d(spec.shape[0], 24, 3, stride, padding=1, bias=False)
    model.set_submodule("conv1.0", stem)
    if _is_small(spec):
        model.maxpool = nn.Identity()
    return model


def _is_small(spec: DataSpec) -> bool:
    return max(spec.shape[1:]) <= 32
