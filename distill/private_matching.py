"""Distribution matching with differential privacy: only noisy class means of real images are used.

A fixed bank of networks sees the real images once, and the class means of all their features are
one noisy release (as DP-MERF's, Harder et al. 2021).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from flwr_distill.distill.augmentation import Augmentation, draw_augmentation
from flwr_distill.distill.distribution_matching import (
    Network,
    Probe,
    falling,
    match_means,
    own_effort,
    real_means,
)
from flwr_distill.distill.errors import DistillError
from flwr_distill.distill.features import MIN_SIDE, RandomConvNet
from flwr_distill.distill.formation import Formation, best_formation
from flwr_distill.distill.inputs import check_inputs
from flwr_distill.distill.privacy import Guarantee, PrivacyCard
from flwr_distill.distill.registry import Progress
from flwr_distill.distill.starts import start
from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.task.compute.opacus_import import root_logger_unchanged

LEARNING_RATE = 0.3
"""At first; falls to 0."""
BANK = 20
"""Networks whose features make up the release, side by side."""
REFERENCE = 256
"""Noise images whose mean features are subtracted."""


@dataclass(frozen=True, eq=False)
class UnitFeatures:
    """Features minus `centre`, those of noise, of length 1: all that one image adds to a sum."""

    network: Network
    centre: Tensor

    def __call__(self, images: Tensor) -> Tensor:
        """Features (n, features) of images (n, C, H, W)."""
        return functional.normalize(self.network(images) - self.centre)


def check_shape(shape: Sequence[int], where: str, epsilon: float) -> None:
    """Raise DistillError unless samples of shape (..., H, W) can be distilled privately.

    `where` is the setting that asks for `epsilon`.
    """
    if min(shape[-2:]) < MIN_SIDE:
        raise DistillError(
            f"compares images of at least {MIN_SIDE} pixels a side, and samples have {shape[-2]} x "
            f"{shape[-1]}; rows of a table have 1 x 1",
            where=where,
            value=epsilon,
            remedy="set it to 0, and take a strategy that trains with train.dp-noise",
        )


@lru_cache
def noise_for(epsilon: float, delta: float) -> float:
    """Noise multiplier at which one Gaussian mechanism spends at most epsilon.

    By Opacus' accountant of Rényi differential privacy, as a node's account counts it: about a
    tenth more noise than the exact formula (Balle and Wang 2018).
    """
    with root_logger_unchanged():  # here: importing Opacus takes a second
        from opacus.accountants.utils import get_noise_multiplier

    try:
        noise = get_noise_multiplier(
            target_epsilon=epsilon, target_delta=delta, sample_rate=1.0, steps=1, accountant="rdp"
        )
        return float(noise)
    except ValueError as error:
        problem = f"out of reach at delta = {delta}: {error}"
        raise DistillError(problem, where="epsilon", value=epsilon, remedy="raise it") from error


def noisy_means(
    network: UnitFeatures,
    augment: Augmentation,
    images: Tensor,
    counts: list[int],
    noise: float,
    generator: torch.Generator,
) -> Tensor:
    """Differentially private class means: ``(sum of features + noise N(0, I)) / count``.

    Features have norm 1, so an image changes a class's sum by at most 1. Counts are public. The
    generator must stay secret: with it, the noise can be removed.
    """
    return with_noise(real_means(network, augment, images, counts), counts, noise, generator)


def with_noise(
    means: Tensor, counts: list[int], noise: float, generator: torch.Generator
) -> Tensor:
    """Means (classes, features) with the noise of their sums; see `noisy_means`."""
    normal = torch.randn(means.shape, generator=generator) / torch.tensor(counts)[:, None]
    return means + noise * normal.to(means)


def distill_dm_privately(
    images: Tensor,
    labels: Tensor,
    *,
    num_classes: int,
    per_class: int,
    pixels: tuple[Tensor, Tensor],
    steps: int | None = None,
    generator: torch.Generator,
    noise_generator: torch.Generator,
    epsilon: float,
    delta: float,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    formation: int = 1,
) -> VirtualData:
    """Distil by distribution matching with (epsilon, delta)-differentially private class means.

    Protects each image, but neither which classes there are nor how many images each has (an image
    is removed without changing the count that its class's sum is divided by). Virtual images start
    from noise. The features of 20 networks have norm 1 each, so an image moves the sum of all of
    them side by side by at most the root of 20. The learning rate falls from 0.3 to 0. The privacy
    card has the guarantee, and no comparison with real images, which would leak.

    See :func:`distill.distribution_matching.distill_dm` for other arguments and errors.

    Parameters
    ----------
    pixels : tuple of Tensor
        The least and the largest value that a pixel can have, (C, 1, 1) each. Must be known without
        the images (see `task.datasets.DataSpec.pixels`).
    generator : torch.Generator
        For networks, augmentations and start, on the CPU; need not be secret.
    noise_generator : torch.Generator
        For the noise on the means, on the CPU. Its seed must stay secret.
    """
    check_inputs(images, labels, num_classes=num_classes, per_class=per_class, steps=steps)
    formation = formation or best_formation(images.shape)
    usual = own_effort(images.shape, formation, None)
    steps = usual.steps if steps is None else steps
    noise = noise_for(epsilon, delta) * math.sqrt(BANK)
    counts = torch.unique(labels, return_counts=True)[1].tolist()
    by_class = images[labels.argsort(stable=True)].to(device)
    tiles = Formation.of(formation, images.shape, device)
    if usual.small:
        by_class, tiles = tiles.shrunk(by_class), tiles.in_small()
    probes = [
        _draw_probe(by_class, counts, usual.width, noise, generator, noise_generator)
        for _ in range(BANK)
    ]
    initial_images, virtual_labels = start("noise", images, labels, per_class, generator, formation)
    virtual = initial_images.reshape(len(counts), per_class, *images.shape[1:]).to(device)
    rates = falling(LEARNING_RATE, steps)
    match_means(virtual, probes, rates, tiles, progress, within=pixels)
    return VirtualData(
        virtual.flatten(0, 1).cpu(),
        virtual_labels,
        "dm-private",
        steps,
        generator.initial_seed(),
        "noise",
        card=PrivacyCard(guarantee=Guarantee(epsilon, delta)),
        formation=formation,
    )


def _draw_probe(
    images: Tensor,
    counts: list[int],
    width: int,
    noise: float,
    generator: torch.Generator,
    noise_generator: torch.Generator,
) -> Probe:
    channels, height, across = images.shape[1:]
    convnet = RandomConvNet.draw(channels, min(height, across), width, generator, images.device)
    augment = draw_augmentation(height, across, generator).to(images.device)
    reference = torch.randn(REFERENCE, *images.shape[1:], generator=generator).to(images.device)
    network = UnitFeatures(convnet, convnet(augment(reference)).mean(0))
    means = noisy_means(network, augment, images, counts, noise, noise_generator)
    return Probe(network, augment, means)
