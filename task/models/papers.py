"""Convolutional networks of HFLDD, CADIS and FedLGD, and a small one for the embedded digits."""

from itertools import pairwise

from torch import nn

from flwr_distill.task.datasets.types import DataSpec
from flwr_distill.task.models.registry import register


@register("digits-cnn", fits=lambda spec: min(spec.shape[1:]) >= 4)
def digits_cnn(spec: DataSpec) -> nn.Module:
    """Two 3x3 convolutions (8, 16), max pooling to 4x4, a hidden layer of 64, one dense layer.

    18,346 parameters on grey images of any size with ten classes.
    """
    return nn.Sequential(
        nn.Conv2d(spec.shape[0], 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(4),
        *dense(16 * 4 * 4, 64, spec.num_classes),
    )


def _pooled(before: int, width: int, padding: int = 0) -> tuple[nn.Module, ...]:
    """A 5x5 convolution with ReLU and 2x2 max pooling."""
    return nn.Conv2d(before, width, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2)


def dense(first: int, *widths: int) -> list[nn.Module]:
    """Dense layers with ReLU between them."""
    layers: list[nn.Module] = [nn.Flatten()]
    for before, width in pairwise((first, *widths)):
        layers += [nn.Linear(before, width), nn.ReLU()]
    return layers[:-1]


@register("hfldd-mnist", fits=lambda spec: spec.shape == (1, 28, 28))
def hfldd_mnist(spec: DataSpec) -> nn.Module:
    """LeNet-5, HFLDD's network for MNIST.

    5x5 convolutions (6, 16) without padding, each with ReLU and 2x2 max pooling; dense layers of
    120, 84 and the classes. 44,426 parameters with ten classes, as in the paper.
    """
    return nn.Sequential(
        *_pooled(1, 6),
        *_pooled(6, 16),
        *dense(16 * 4 * 4, 120, 84, spec.num_classes),
    )


@register("hfldd-cifar10", fits=lambda spec: min(spec.shape[1:]) >= 16)
def hfldd_cifar10(spec: DataSpec) -> nn.Module:
    """HFLDD's network for CIFAR-10: four blocks of two 3x3 convolutions, one dense layer.

    Batch norm and ReLU after each convolution, 2x2 max pooling after each block; 1,020,160
    parameters with ten classes, as in the paper. It states no widths: ours come nearest to doubling
    of the 112 rows of widths with this number (docs/methods/hfldd.md). Batch norm has the biases.
    """
    widths = (27, 63, 127, 229)
    blocks = [_double_convolution(*pair) for pair in pairwise((spec.shape[0], *widths))]
    height, width = (side // 16 for side in spec.shape[1:])
    dense = nn.Linear(widths[-1] * height * width, spec.num_classes)
    return nn.Sequential(*blocks, nn.Flatten(), dense)


def _double_convolution(before: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(before, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


@register("cadis-mnist", fits=lambda spec: min(spec.shape[1:]) >= 4)
def cadis_mnist(spec: DataSpec) -> nn.Module:
    """CADIS's network for MNIST: 5x5 convolutions (32, 64), a hidden layer of 512.

    The network of McMahan et al. (2017), with padded convolutions, ReLU and 2x2 max pooling:
    1,663,370 parameters on 1x28x28 with ten classes.
    """
    height, width = (side // 4 for side in spec.shape[1:])
    return nn.Sequential(
        *_pooled(spec.shape[0], 32, padding=2),
        *_pooled(32, 64, padding=2),
        *dense(64 * height * width, 512, spec.num_classes),
    )


@register("convnet3", fits=lambda spec: min(spec.shape[1:]) >= 8)
def convnet3(spec: DataSpec) -> nn.Module:
    """ConvNet-3 of the dataset distillation papers (HFLDD on CINIC-10, FedLGD).

    Three blocks of 128 filters of 3x3, affine instance norm, ReLU and 2x2 average pooling; one
    dense layer. 320,010 parameters on 3x32x32 with ten classes, as in HFLDD.
    """
    return convnet(spec, filters=128, groups=128)


@register("convnet3-gn", fits=lambda spec: spec.kind == "image" and min(spec.shape[1:]) >= 8)
def convnet3_gn(spec: DataSpec) -> nn.Module:
    """FedLGD's ConvNet-3 with group norm, 128 filters; 320,010 parameters on 3x32x32.

    Its table 9 does not state the groups: there are 4, as in the published code.
    """
    return convnet(spec, filters=128, groups=4)


@register("convnet3-gn32", fits=lambda spec: spec.kind == "image" and min(spec.shape[1:]) >= 8)
def convnet3_gn32(spec: DataSpec) -> nn.Module:
    """The same with 32 filters, for machines without a GPU."""
    return convnet(spec, filters=32, groups=4)


def convnet(spec: DataSpec, filters: int, groups: int) -> nn.Module:
    """Three blocks of 3x3 filters, group norm, ReLU and 2x2 average pooling; one dense layer."""
    layers: list[nn.Module] = []
    for before in (spec.shape[0], filters, filters):
        layers += [
            nn.Conv2d(before, filters, 3, padding=1),
            nn.GroupNorm(groups, filters),
            nn.ReLU(),
            nn.AvgPool2d(2),
        ]
    height, width = (side // 8 for side in spec.shape[1:])
    dense = nn.Linear(filters * height * width, spec.num_classes)
    return nn.Sequential(*layers, nn.Flatten(), dense)
