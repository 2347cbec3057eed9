"""An untrained StyleGAN-v2, whose images VHL's nodes share (Karras et al. 2020)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from flwr_distill.task.datasets import DataSpec, Samples

WIDTH = 64
"""Channels at all sizes; the published code's generator has 512."""
STYLE = 64
LATENT_MEANS = 0.5
LATENT_DEVIATION = 0.3
NOISE_DEVIATION = 0.1
"""Of the published code: of classes' latent means, of latents around them, and of all layers'
noise around its mean."""
FIRST = 4
AT_ONCE = 100
BLUR = torch.tensor([1.0, 3.0, 3.0, 1.0])


class Layer(NamedTuple):
    """A modulated convolution: weight (out, in, k, k), and weight of its style (in, STYLE)."""

    weight: Tensor
    style: Tensor

    @classmethod
    def draw(cls, width: int, size: int, generator: torch.Generator) -> "Layer":
        """A layer with weights as StyleGAN-v2 starts with, scaled for equal learning rates."""
        weight = torch.randn(width, WIDTH, size, size, generator=generator)
        style = torch.randn(WIDTH, STYLE, generator=generator)
        return cls(weight / math.sqrt(WIDTH * size**2), style / math.sqrt(STYLE))

    def __call__(self, x: Tensor, style: Tensor, *, demodulate: bool = True) -> Tensor:
        """Convolve x (n, in, H, W) by weights of each image's own style (n, STYLE)."""
        weight = self.weight * (1 + style @ self.style.T)[:, None, :, None, None]
        if demodulate:
            weight = weight * torch.rsqrt(weight.square().sum((2, 3, 4), keepdim=True) + 1e-8)
        images = x.reshape(1, -1, *x.shape[2:])
        padding = weight.shape[-1] // 2
        made = functional.conv2d(images, weight.flatten(0, 1), padding=padding, groups=len(x))
        return made.reshape(len(x), -1, *x.shape[2:])


def style_images(spec: DataSpec, per_class: int, seed: int) -> Samples:
    """Images of an untrained StyleGAN-v2, (num_classes * per_class, C, H, W) sorted by class.

    As in VHL's published code, a class has a mean of its latents, and one of the noise that enters
    each layer. Values have mean 0 and deviation 1. Equal seeds give the same images on every node,
    to rounding.

    What differs from the published generator: 64 channels, not 512; features are repeated and
    smoothed in place of a transposed convolution; and the classes' means of noise are drawn, not
    optimised to be far apart.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    sizes = [FIRST]
    while sizes[-1] < max(spec.shape[1:]):
        sizes.append(2 * sizes[-1])
    channels, height, width = spec.shape
    constant, mapping = normal(1, WIDTH, FIRST, FIRST), normal(STYLE, STYLE) / math.sqrt(STYLE)
    layers = [
        [Layer.draw(WIDTH, 3, generator) for _ in range(1 if size == FIRST else 2)]
        for size in sizes
    ]
    to_pixels = [Layer.draw(channels, 1, generator) for _ in sizes]
    num_layers = sum(map(len, layers))
    latent_means = LATENT_MEANS * normal(spec.num_classes, STYLE)
    noise_means = functional.normalize(normal(spec.num_classes, num_layers), dim=1)

    def made(classes: Tensor) -> Tensor:
        latents = latent_means[classes] + LATENT_DEVIATION * normal(len(classes), STYLE)
        latents = latents * torch.rsqrt(latents.square().mean(1, keepdim=True) + 1e-8)
        style = _activated(latents @ mapping.T)
        means = iter(noise_means[classes].T)
        x, pixels = constant.expand(len(classes), -1, -1, -1), torch.zeros(())
        for size, own, last in zip(sizes, layers, to_pixels, strict=True):
            if size > FIRST:
                x, pixels = _doubled(x), _doubled(pixels)
            for layer in own:
                noise = normal(len(classes), 1, size, size) * NOISE_DEVIATION / num_layers
                x = _activated(layer(x, style) + noise + next(means)[:, None, None, None])
            pixels = pixels + last(x, style, demodulate=False)
        top, left = (sizes[-1] - height) // 2, (sizes[-1] - width) // 2
        return pixels[:, :, top : top + height, left : left + width]

    labels = torch.arange(spec.num_classes).repeat_interleave(per_class)
    images = torch.cat([made(classes) for classes in torch.split(labels, AT_ONCE)])
    deviation, mean = torch.std_mean(images, dim=(0, 2, 3), keepdim=True, correction=0)
    return Samples((images - mean) / deviation, labels)


def _activated(x: Tensor) -> Tensor:
    return math.sqrt(2) * functional.leaky_relu(x, 0.2)


def _doubled(x: Tensor) -> Tensor:
    """Images of twice the size, smoothed by StyleGAN-v2's kernel."""
    channels = x.shape[1]
    kernel = BLUR[:, None] * BLUR
    kernel = (kernel / kernel.sum()).expand(channels, 1, -1, -1)
    large = x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    padded = functional.pad(large, (1, 2, 1, 2), mode="replicate")
    return functional.conv2d(padded, kernel, groups=channels)
