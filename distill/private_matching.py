"""Distribution matching with differential privacy: only noisy class means of real images are used.

A fixed bank of networks sees the real images once. Per network the class means are released with
Gaussian noise; optimising virtual images is post-processing.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from distill.augmentation import Augmentation, draw_augmentation
from distill.distribution_matching import LEARNING_RATE, Network, Probe, match_means, real_means
from distill.errors import DistillError
from distill.features import RandomConvNet
from distill.formation import Formation, best_formation
from distill.inputs import check_inputs
from distill.privacy import Guarantee, PrivacyCard
from distill.registry import Progress
from distill.starts import start
from distill.virtual_data import VirtualData

STEPS = 400
WIDTH = 64
BANK = 20
"""Networks; the class means of each are one release."""
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
def noise_for(epsilon: float, delta: float, releases: int = BANK) -> float:
    """Noise multiplier at which `releases` Gaussian mechanisms spend at most epsilon in all.

    Raises
    ------
    DistillError
        If no noise reaches an epsilon this small.
    """
    from opacus.accountants.utils import get_noise_multiplier  # slow to import

    try:
        return float(
            get_noise_multiplier(
                target_epsilon=epsilon,
                target_delta=delta,
                sample_rate=1.0,
                steps=releases,
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
        Noise multiplier.
    generator : torch.Generator
        For the noise, on the CPU. Its state must stay secret: with it, the noise can be removed.
    """
    means = real_means(network, augment, images, counts)
    normal = torch.randn(means.shape, generator=generator) / torch.tensor(counts)[:, None]
    return means + noise * normal.to(means)


def distill_dm_privately(
    images: Tensor,
    labels: Tensor,
    *,
    num_classes: int,
    per_class: int,
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

    Parameters
    ----------
    images, labels, num_classes, per_class, steps, device, progress, formation
        See :func:`distill.distribution_matching.distill_dm`, also for errors.
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
    steps = STEPS if steps is None else steps
    check_inputs(images, labels, num_classes=num_classes, per_class=per_class, steps=steps)
    noise = noise_for(epsilon, delta)
    by_class = images[labels.argsort(stable=True)].to(device)
    counts = torch.unique(labels, return_counts=True)[1].tolist()
    probes = [_draw_probe(by_class, counts, noise, generator, noise_generator) for _ in range(BANK)]
    formation = formation or best_formation(images.shape)
    initial_images, virtual_labels = start("noise", images, labels, per_class, generator, formation)
    virtual = initial_images.reshape(len(counts), per_class, *images.shape[1:]).to(device)
    tiles = Formation.of(formation, images.shape, device)
    match_means(virtual, probes, [LEARNING_RATE] * steps, tiles, progress)
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
    noise: float,
    generator: torch.Generator,
    noise_generator: torch.Generator,
) -> Probe:
    channels, height, across = images.shape[1:]
    convnet = RandomConvNet.draw(channels, min(height, across), WIDTH, generator, images.device)
    augment = draw_augmentation(height, across, generator).to(images.device)
    reference = torch.randn(REFERENCE, *images.shape[1:], generator=generator).to(images.device)
    network = UnitFeatures(convnet, convnet(augment(reference)).mean(0))
    means = noisy_means(network, augment, images, counts, noise, noise_generator)
    return Probe(network, augment, means)
