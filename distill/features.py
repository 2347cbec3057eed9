"""Random convolutional features: untrained ConvNets that see images as a classifier would."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from distill.errors import DistillError

SMALLEST_SIDE = 4


@dataclass(frozen=True, eq=False)
class RandomConvNet:
    """The ConvNet of the distillation papers at a random start, without its classifier.

    Up to three blocks of 3x3 convolution, instance norm, ReLU and 2x2 average pooling; as many
    as leave a side of at least 2 pixels.

    Parameters
    ----------
    filters : tuple[Tensor, ...]
        One (width, inputs, 3, 3) a block.
    """

    filters: tuple[Tensor, ...]

    @classmethod
    def draw(
        cls,
        channels: int,
        side: int,
        width: int,
        generator: torch.Generator,
        device: torch.device | str = "cpu",
    ) -> "RandomConvNet":
        """Draw a network.

        Parameters
        ----------
        channels : int
            Of the images.
        side : int
            Their shorter side in pixels; at least 4.
        width : int
            Filters a block.
        generator : torch.Generator
            Source of the filters, on the CPU.
        device : torch.device or str (default: "cpu")
            Where the network lives.

        Returns
        -------
        RandomConvNet
            With He-normal filters.

        Raises
        ------
        DistillError
            If the images are too small.
        """
        if side < SMALLEST_SIDE:
            raise DistillError(
                f"images must be at least {SMALLEST_SIDE} pixels a side for ConvNet features, "
                f"got {side}; use distiller 'kip'"
            )
        blocks = min(3, side.bit_length() - 2)
        filters = []
        for inputs in [channels] + [width] * (blocks - 1):
            deviation = (2 / (9 * inputs)) ** 0.5
            noise = torch.randn(width, inputs, 3, 3, generator=generator)
            filters.append((deviation * noise).to(device))
        return cls(tuple(filters))

    def __call__(self, images: Tensor) -> Tensor:
        """Return the features of images (n, C, H, W), flattened to (n, features)."""
        for weight in self.filters:
            images = functional.conv2d(images, weight.to(images.dtype), padding=1)
            images = functional.relu(functional.group_norm(images, len(weight)))
            images = halve(images)
        return images.flatten(1)


def halve(images: Tensor) -> Tensor:
    """Average 2x2 pixels into one, as a matrix product.

    Equal to `torch.nn.functional.avg_pool2d(images, 2)`, odd last rows and columns dropped;
    on a CPU that one is several times slower, and slower still in its gradient.

    Parameters
    ----------
    images : Tensor
        (n, C, H, W).

    Returns
    -------
    Tensor
        (n, C, H // 2, W // 2).
    """
    height, width = images.shape[2] // 2, images.shape[3] // 2
    row_pairs = images[..., : 2 * height, : 2 * width].reshape(*images.shape[:2], height, -1)
    average = torch.eye(width, dtype=images.dtype, device=images.device) / 4
    return row_pairs @ average.repeat_interleave(2, 0).repeat(2, 1)
