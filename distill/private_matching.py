"""Distribution matching with differential privacy: only noisy class means of real images are used.

A fixed bank of networks sees the real images once, and the class means of all their features leave
as one noisy release (as DP-MERF's, Harder et al. 2021). All that comes after, optimising virtual
images too, is post-processing and costs nothing.
"""

import math
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
from flwr_distill.distill.features import RandomConvNet
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
    """Features minus `centre`, those of noise, normalised to length 1.

    The norm bounds what one image adds to a sum. What all images share is subtracted first, so that
    it does not use up the norm.
    """

    network: Network
    centre: Tensor

    def __call__(self, images: Tensor) -> Tensor:
        """Features (n, features) of images (n, C, H, W)."""
        return functional.normalize(self.network(images) - self.centre)


@lru_cache
def noise_for(epsilon: float, delta: float) -> float:
    """Noise multiplier at which one Gaussian mechanism spends at most epsilon.

    By Opacus' accountant of Rényi differential privacy, as a node's account counts it: about a
    tenth more noise than the exact formula (Balle and Wang 2018) asks for.

    Raises
    ------
    DistillError
        If no noise reaches an epsilon this small.
    """
    with root_logger_unchanged():  # here: importing Opacus takes a second
        from opacus.accountants.utils import get_noise_multiplier

    try:
        return float(
            get_noise_multiplier(
                target_epsilon=epsilon,
                target_delta=delta,
                sample_rate=1.0,
                steps=1,
                accountant="rdp",
            )
        )
    except ValueError as error:
        raise DistillError(f"epsilon = {epsilon} at delta = {delta}: {error}; raise it") from error


def noisy_means(
    network: UnitFeatures,
    augment: Augmentation,
    images: Tensor,
    counts: list[int],
    noise: float,
    generator: torch.Generator,
) -> Tensor:
    """Differentially private class means: ``(sum of features + noise N(0, I)) / count``.

    Features have norm 1, so one image changes a class's sum by at most 1. Counts are taken as
    public.

    Parameters
    ----------
    network, augment, images, counts
        See :func:`distill.distribution_matching.real_means`.
    noise : float
        Standard deviation of the noise on a sum.
    generator : torch.Generator
        For the noise, on the CPU. Its state must stay secret: with it, the noise can be removed.
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

    Protects each image. Does not protect which classes there are and how many images each has (an
    image is removed without changing the count that its class's sum is divided by). Virtual images
    start from noise.

    The features of 20 networks have norm 1 each, so an image moves the sum of all of them side by
    side by at most the root of 20, and the Gaussian noise is for that. Where virtual images hold
    smaller ones of at least 8 pixels a side, networks see images in that size, as in
    :func:`distill.distribution_matching.distill_dm`. The learning rate falls from 0.3 to 0.

    Parameters
    ----------
    images, labels, num_classes, per_class, device, progress, formation
        See :func:`distill.distribution_matching.distill_dm`, also for errors.
    pixels : tuple of Tensor
        The least and the largest value that a pixel can have, (C, 1, 1) each. Must be known without
        the images (see `task.datasets.DataSpec.pixels`): virtual pixels stay within them.
    steps : int, optional (default: None)
        None means 400, or 600 for small images in their own size.
    generator : torch.Generator
        For networks, augmentations and start, on the CPU; need not be secret.
    noise_generator : torch.Generator
        For the noise on the means, on the CPU. Its seed must stay secret.
    epsilon, delta : float
        > 0, for the whole distillation.

    Returns
    -------
    VirtualData
        Sorted by class. Its privacy card has the guarantee, and no comparison with real images,
        which would leak information about them.
    """
    check_inputs(
        images,
        labels,
        num_classes=num_classes,
        per_class=per_class,
        steps=1 if steps is None else steps,
    )
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
        images=virtual.flatten(0, 1).cpu(),
        labels=virtual_labels,
        method="dm-private",
        steps=steps,
        seed=generator.initial_seed(),
        init="noise",
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
