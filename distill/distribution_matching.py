"""Distribution matching (Zhao and Bilen 2023): match class means of random features.

The published loop draws a network and an augmentation per step and passes hundreds of real images
through them. Here a **bank** of such pairs is drawn once, with the real class means of each. Steps
cycle through the bank and only process virtual images.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from flwr_distill.distill.augmentation import Augmentation, draw_augmentation
from flwr_distill.distill.errors import DistillError
from flwr_distill.distill.features import RandomConvNet, are_vectors
from flwr_distill.distill.formation import Formation, best_formation
from flwr_distill.distill.inputs import check_inputs
from flwr_distill.distill.pixel_optimizers import SGD_RATE, pixel_optimizer
from flwr_distill.distill.registry import Progress, register
from flwr_distill.distill.starts import start
from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.task.compute.cuda_graph import graphed
from flwr_distill.task.settings import ImageOptimizer, MeansOf

LEARNING_RATE = 0.05
WIDTH = 64
SMALL_LEARNING_RATE = 0.1
"""Of small images in their own size at first; the rate falls to 0."""
REFINE_BANK = 5
"""Augmentations that a refinement takes in turn; each costs a pass of a class's real images."""
MIN_SIDE = 8
"""Of small images that are matched in their own size; smaller ones are enlarged."""
COARSE = 8
REAL_PER_CLASS = 256
MIN_GROUP = 50
"""Real images: the mean of so many shows no single one."""
REAL_PER_GROUP = 64
CHUNK_FLOATS = 2**20
"""Of the first layer's activations: 4 MB, for a CPU's cache."""
GPU_CHUNK_FLOATS = 2**27
"""512 MB; a GPU has no such cache, and each chunk starts all kernels once more."""
GRADIENT_FLOATS = 2**24
"""Most of the first layer's activations that a CPU keeps for the way back: 64 MB."""

Network = Callable[[Tensor], Tensor]
"""Features (n, features) of images (n, C, H, W), differentiable by them."""


class Effort(NamedTuple):
    """Steps, filters per block and number of networks of distribution matching.

    `small`: networks see small images in their own size, and give features of all depths.
    """

    small: bool
    steps: int
    width: int
    bank: int


def own_effort(shape: Sequence[int], formation: int, network: Network | None) -> Effort:
    """Defaults of `distill_dm` for images of shape (..., H, W)."""
    formation = formation or best_formation(shape)
    fits = min(shape[-2:]) // formation >= MIN_SIDE
    if formation > 1 and network is None and fits:
        return Effort(small=True, steps=600, width=32, bank=20)
    return Effort(small=False, steps=400, width=WIDTH, bank=40)


@dataclass(frozen=True, eq=False)
class Probe:
    """A fixed network and augmentation, with the class means (classes, features) of real images.

    Real and virtual images get the same augmentation.
    """

    network: Network
    augment: Augmentation
    means: Tensor

    def loss_and_gradient(self, virtual: Tensor) -> tuple[Tensor, Tensor]:
        """Sum over classes of the squared distance between mean features, and its gradient.

        `virtual` has the shape (classes, per_class, C, H, W).
        """
        loss = torch.zeros((), device=virtual.device)
        gradient = torch.empty_like(virtual)
        chunk = _chunk(self.network, virtual.shape, virtual.device, CHUNK_FLOATS)
        size = max(1, chunk // virtual.shape[1])
        # A few whole classes at a time, so that activations stay in a CPU's cache.
        parts = (torch.split(x, size) for x in (virtual, self.means, gradient))
        for images, means, by_images in zip(*parts, strict=True):
            leaf = images.detach().requires_grad_()
            features = self._features(leaf.flatten(0, 1))
            distance = features.reshape(*images.shape[:2], -1).mean(1).sub(means).square().sum()
            by_images.copy_(torch.autograd.grad(distance, leaf)[0])
            loss += distance.detach()
        return loss, gradient

    def _features(self, images: Tensor) -> Tensor:
        """Features, of large images a few at a time; those are computed again on the way back."""

        def features(chunk: Tensor) -> Tensor:
            return self.network(self.augment(chunk))

        chunks = torch.split(
            images, _chunk(self.network, images.shape, images.device, GRADIENT_FLOATS)
        )
        if len(chunks) == 1:
            return features(images)
        # The random state is unreadable while a CUDA graph is recorded, and nothing is drawn.
        return torch.cat(
            [
                checkpoint(features, chunk, use_reentrant=False, preserve_rng_state=False)
                for chunk in chunks
            ]
        )


@torch.no_grad()
def real_means(
    network: Network,
    augment: Augmentation,
    images: Tensor,
    counts: list[int],
    places: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Mean features (classes, features) of images sorted by class, `counts` of each class.

    They are the images at `places` (default: all in order), on `device` (default: the images'),
    gathered and computed a few at a time.
    """
    device = device or images.device
    places = torch.arange(len(images), device=images.device) if places is None else places
    chunks = torch.split(places, _chunk(network, images.shape, device, CHUNK_FLOATS))
    features = torch.cat(
        [network(augment(images[chunk].to(device, non_blocking=True))) for chunk in chunks]
    )
    return torch.stack([own.mean(0) for own in torch.split(features, counts)])


@register("dm")
def distill_dm(
    images: Tensor,
    labels: Tensor,
    *,
    num_classes: int,
    per_class: int,
    init: str = "class-stats",
    steps: int | None = None,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    formation: int = 1,
    width: int | None = None,
    bank: int | None = None,
    network: Network | None = None,
    initial_images: Tensor | None = None,
    means_of: MeansOf = "groups",
    optimizer: ImageOptimizer = "adam",
) -> VirtualData:
    """Distil by distribution matching (Zhao and Bilen 2023, eq. 5 and algorithm 1).

    The real images of a large class are split into groups of similar images (`alike`), and virtual
    images match the mean of a group each: with the class's mean alone they would all show much the
    same. A group has at least 50 images, and there are as many as the smallest class allows. Means
    use at most 256 images per class, or 64 per group if those are more, redrawn for each network.
    With ``means_of="classes"`` the loss is FedLGD's eq. 1 as printed: the mean of all real images
    of a class, without augmentation.

    Where virtual images contain smaller ones of at least 8 pixels a side, real images are shrunk to
    these. A step then costs a quarter with a formation of 2, and more steps are worth more than
    more pixels. Random networks give features of all depths, as the last ones are too few; the
    start is smooth, since matching removes little of the initial noise. The learning rate (of Adam,
    in units of normalised pixels) falls from 0.1 to 0 as a cosine, and pixels stay within the real
    ones' values. Otherwise, or with a `network`, the rate is 0.05 throughout.

    Parameters
    ----------
    images, labels, num_classes, per_class, init, generator, device, progress, formation
        See `distill.registry.Distiller`. Images must be at least 4 pixels a side; vectors
        (n, d, 1, 1) are compared directly, without a network.
    steps : int, optional (default: None)
        None means 400, or 600 for small images in their own size.
    width : int, optional (default: None)
        Filters per block of the random ConvNets; None means 64, or 32 for small images.
    bank : int, optional (default: None)
        Pairs of network and augmentation; at most `steps` are drawn. None means 40, or 20 for
        small images.
    network : Network, optional (default: None)
        On the same device, instead of random ones: FedLGD (eq. 1) passes the global model's.
    initial_images : Tensor, optional (default: None)
        Virtual images to continue from, (classes present * per_class, C, H, W), sorted by class.
    means_of : str (default: "groups")
        ``groups`` of similar images, or ``classes``.
    optimizer : str (default: "adam")
        ``adam``, or ``sgd`` at a constant rate of 1 with momentum 0.5.
    """
    check_inputs(images, labels, num_classes=num_classes, per_class=per_class, steps=steps)
    formation = formation or best_formation(images.shape)
    tiles = Formation.of(formation, images.shape, device)
    usual = own_effort(images.shape, formation, network)
    steps = usual.steps if steps is None else steps
    width = usual.width if width is None else width
    bank = usual.bank if bank is None else bank
    if min(width, bank) < 1:
        raise DistillError("must be at least 1", where="width and bank", value=(width, bank))
    start_images, virtual_labels = start(
        init, images, labels, per_class, generator, formation, smooth=usual.small
    )
    initial_images = start_images if initial_images is None else initial_images
    if initial_images.shape != start_images.shape:
        raise DistillError(
            f"must have shape {tuple(start_images.shape)}, {per_class} per class",
            where="initial_images",
            value=tuple(initial_images.shape),
        )
    classes = [(labels == c).nonzero()[:, 0].to(images.device) for c in torch.unique(labels)]
    of_classes = means_of == "classes"
    each = 1 if of_classes else own_groups(min(map(len, classes)), per_class)
    groups = [own[group] for own in classes for group in alike(images[own], each)]
    real, rates = images, [LEARNING_RATE] * steps
    within: tuple[Tensor, Tensor] | None = None
    if usual.small:
        rates, within = falling(SMALL_LEARNING_RATE, steps), images.aminmax()
        real, tiles = tiles.shrunk(images), tiles.in_small()
    if optimizer == "sgd":
        rates = [SGD_RATE] * steps
    most = len(images) if of_classes else max(REAL_PER_CLASS // each, REAL_PER_GROUP)
    if of_classes and network is not None:
        bank = 1  # all probes would be the same

    def draw_probe() -> Probe:
        pair = draw_pair(real.shape, width, generator, device, network, all_depths=usual.small)
        if of_classes:
            pair = pair[0], Augmentation(_unchanged, ())
        orders = [torch.randperm(len(own), generator=generator)[:most] for own in groups]
        drawn = zip(groups, orders, strict=True)
        places = torch.cat([own[x.to(own.device, non_blocking=True)] for own, x in drawn])
        counts = [len(x) for x in orders]
        return Probe(*pair, real_means(*pair, real, counts, places, torch.device(device)))

    probes = [draw_probe() for _ in range(min(bank, steps))]
    virtual = initial_images.reshape(len(groups), per_class // each, *images.shape[1:])
    virtual = virtual.to(device, copy=True)
    match_means(virtual, probes, rates, tiles, progress, within=within, optimizer=optimizer)
    return VirtualData(
        virtual.flatten(0, 1).cpu(),
        virtual_labels,
        "dm",
        steps,
        generator.initial_seed(),
        init,
        initial_images=initial_images,
        formation=formation,
    )


def falling(learning_rate: float, steps: int) -> list[float]:
    """The rate of each step: falls to 0 as half a cosine."""
    return [learning_rate * (1 + math.cos(math.pi * i / steps)) / 2 for i in range(steps)]


def match_means(
    virtual: Tensor,
    probes: Sequence[Probe],
    learning_rates: Sequence[float],
    formation: Formation,
    progress: Progress | None = None,
    *,
    within: tuple[Tensor, Tensor] | None = None,
    optimizer: ImageOptimizer = "adam",
) -> None:
    """Optimise virtual images in place so that their group means match those of the probes.

    `virtual` has the shape (groups, per_group, C, H, W) and is decoded by `formation`. Each
    learning rate is a step with the next probe, after which pixels are clamped to `within`. On a
    GPU, only `progress` waits for it.
    """
    stepper = pixel_optimizer(optimizer, virtual, lr=LEARNING_RATE)
    loss_and_gradient = graphed(Probe.loss_and_gradient, virtual.device)
    bounds = None if within is None else [x.to(virtual.device, non_blocking=True) for x in within]
    for step, rate in enumerate(learning_rates):
        probe = probes[step % len(probes)]
        loss, gradient = loss_and_gradient(probe, formation.decode(virtual))
        virtual.grad = formation.pullback(gradient)
        stepper.param_groups[0]["lr"] = rate
        stepper.step()
        if bounds is not None:
            virtual.clamp_(*bounds)
        if progress is not None:
            progress(step + 1, len(learning_rates), float(loss))


def alike(images: Tensor, groups: int) -> list[Tensor]:
    """Places of images (n, C, H, W) in groups of one size, or two, that look alike.

    Cuts along the first principal component of the images at 8 x 8 pixels, or of vectors, and each
    part again. On the CPU: a GPU's eigenvectors may point the other way.
    """
    vectors = are_vectors(images.shape)
    small = images if vectors else functional.adaptive_avg_pool2d(images, COARSE)
    small = small.flatten(1).cpu()

    def parts(places: Tensor, groups: int) -> list[Tensor]:
        if groups == 1:
            return [places]
        own = small[places] - small[places].mean(0)
        if vectors and own.shape[0] < own.shape[1]:  # the smaller of two equations for the same
            along = torch.linalg.eigh(own @ own.mT).eigenvectors[:, -1]
        else:
            along = own @ torch.linalg.eigh(own.mT @ own).eigenvectors[:, -1]
        order = along.argsort(stable=True)
        below = groups // 2
        cut = len(places) * below // groups
        return parts(places[order[:cut]], below) + parts(places[order[cut:]], groups - below)

    return [part.to(images.device) for part in parts(torch.arange(len(images)), groups)]


def own_groups(smallest: int, per_class: int) -> int:
    """Groups of each class: as many as leave each enough real images, and as many virtual ones."""
    most = max(1, smallest // MIN_GROUP)
    return max(n for n in range(1, min(most, per_class) + 1) if per_class % n == 0)


def draw_pair(
    shape: Sequence[int],
    width: int,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
    network: Network | None = None,
    *,
    all_depths: bool = False,
) -> tuple[Network, Augmentation]:
    """Draw a network, if none is given, and an augmentation for images of shape (..., C, H, W)."""
    channels, height, across = shape[-3:]
    if are_vectors(shape):
        return network or _numbers, Augmentation(_unchanged, ())
    if network is None:
        side = min(height, across)
        network = RandomConvNet.draw(
            channels, side, width, generator, device, all_depths=all_depths
        )
    return network, draw_augmentation(height, across, generator).to(device)


def _unchanged(images: Tensor) -> Tensor:
    return images


def _numbers(vectors: Tensor) -> Tensor:
    """Vectors (n, d, 1, 1) as features (n, d)."""
    return vectors.flatten(1)


def _chunk(network: Network, shape: Sequence[int], device: torch.device, on_cpu: int) -> int:
    """Number of images to compute at once."""
    width = len(network.filters[0]) if isinstance(network, RandomConvNet) else WIDTH
    floats = on_cpu if device.type == "cpu" else GPU_CHUNK_FLOATS
    return max(1, floats // (width * shape[-2] * shape[-1]))
