"""Shadow nodes: virtual data made from many random halves of the same images.

The attacker is a strong one: it knows the images, the distiller, its settings and the seed of all
draws (a server does), so that sets differ by their real images alone.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flwr_distill.distill.augmentation import Augmentation
from flwr_distill.distill.distribution_matching import (
    LEARNING_RATE,
    REAL_PER_CLASS,
    REAL_PER_GROUP,
    REFINE_BANK,
    SMALL_LEARNING_RATE,
    Effort,
    Network,
    Probe,
    alike,
    draw_pair,
    falling,
    match_means,
    own_effort,
    own_groups,
)
from flwr_distill.distill.errors import DistillError
from flwr_distill.distill.formation import Formation, best_formation
from flwr_distill.distill.many import distill_many
from flwr_distill.distill.membership import Flags
from flwr_distill.distill.registry import Progress
from flwr_distill.distill.starts import start
from flwr_distill.distill.virtual_data import VirtualData

SETS_AT_ONCE = 16
"""Distilled by KIP together; bounds the memory."""


class Canaries(NamedTuple):
    """Images, labels, and of each the kind: "usual", or a record that is found most easily.

    `twin` (n,) is the place whose membership an image shares: its own, but for a duplicate's.
    """

    images: Tensor
    labels: Tensor
    kinds: NDArray[np.str_]
    twin: NDArray[np.int64]


def with_canaries(
    images: Tensor,
    labels: Tensor,
    each: int,
    generator: torch.Generator,
    others: Tensor | None = None,
) -> Canaries:
    """Make some of the images (n, C, H, W) the worst records that a node may have.

    Of `each` kind: "mislabelled" (the label of another class that is present), "strange" (noise of
    the images' mean and deviation), and "duplicated" (another image becomes their copy). With
    `others`, images of other classes (m, C, H, W), m >= each, mislabelled ones are of these.
    Without, a single class has none. Raises `DistillError` if there are too few images.
    """
    classes = torch.unique(labels)
    if 8 * each > len(images) or (others is not None and each > len(others)):
        raise DistillError(
            f"need {8 * each} images at least, and {each} of other classes if any, "
            f"got {len(images)} and {len(images if others is None else others)}",
            where="canaries",
            value=each,
            remedy="take fewer canaries or more images",
        )
    images, labels = images.clone(), labels.clone()
    kinds = np.full(len(images), "usual", dtype="<U11")
    twin = np.arange(len(images))
    order = torch.randperm(len(images), generator=generator)
    wrong, strange, first = (order[i * each : (i + 1) * each] for i in range(3))
    kinds[strange.numpy()] = "strange"
    if others is not None:
        images[wrong] = others[torch.randperm(len(others), generator=generator)[:each]]
        kinds[wrong.numpy()] = "mislabelled"
    elif len(classes) > 1:
        place = torch.searchsorted(classes, labels[wrong])
        turn = torch.randint(1, len(classes), (each,), generator=generator)
        labels[wrong] = classes[(place + turn) % len(classes)]
        kinds[wrong.numpy()] = "mislabelled"
    noise = torch.randn(each, *images.shape[1:], generator=generator)
    images[strange] = images.mean() + images.std() * noise
    spare = [int(i) for i in order[3 * each :]]
    for own in first.tolist():
        copy = next(i for i in spare if labels[i] == labels[own])
        spare.remove(copy)
        images[copy] = images[own]
        kinds[[own, copy]], twin[copy] = "duplicated", own
    return Canaries(images, labels, kinds, twin)


def draw_members(sets: int, canaries: Canaries, generator: np.random.Generator) -> Flags:
    """Which images each set is made from, bool (sets, n): independently with probability 1/2.

    A set with a class of which no image was drawn is drawn again.
    """
    present = np.unique(canaries.labels.numpy())
    rows: list[Flags] = []
    for _ in range(100 * sets):
        row = (generator.random(len(canaries.twin)) < 0.5)[canaries.twin]
        if len(np.unique(canaries.labels.numpy()[row])) == len(present):
            rows.append(row)
        if len(rows) == sets:
            return np.stack(rows)
    raise DistillError(
        "a class has too few images to draw halves of it", remedy="give at least 10 of each"
    )


def distil_subsets(
    method: str,
    images: Tensor,
    labels: Tensor,
    members: Flags,
    *,
    num_classes: int,
    seed: int = 0,
    progress: Progress | None = None,
    **options: Any,
) -> list[VirtualData]:
    """Distil each of the subsets, `members` bool (sets, n), with the same seed.

    "dm" shares its networks' passes between the subsets (`dm_of_subsets`). See
    `distill.registry.Distiller` for the arguments.
    """
    if method == "dm":
        return dm_of_subsets(images, labels, members, seed=seed, progress=progress, **options)
    distilled: list[VirtualData] = []
    for rows in np.array_split(members, -(-len(members) // SETS_AT_ONCE)):
        own = [torch.from_numpy(row) for row in rows]
        distilled += distill_many(
            method,
            [(images[row], labels[row]) for row in own],
            num_classes=num_classes,
            generators=[_seeded(seed) for _ in rows],
            **options,
        )
        if progress is not None:
            progress(len(distilled), len(members), 0.0)
    return distilled


def dm_of_subsets(
    images: Tensor,
    labels: Tensor,
    members: Flags,
    *,
    per_class: int,
    init: str = "class-stats",
    steps: int | None = None,
    formation: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
    network: Network | None = None,
    previous: Sequence[VirtualData] | None = None,
) -> list[VirtualData]:
    """Distil subsets by distribution matching, all with one bank of networks.

    As :func:`distill.distribution_matching.distill_dm`, but the bank does not depend on the sizes
    of classes, and pixels stay within the values of all images instead of the subset's. `network`
    replaces random ones; `previous` virtual data of each subset are refreshed.
    """
    formation = formation or best_formation(images.shape)
    tiles = Formation.of(formation, images.shape)
    usual = own_effort(images.shape, formation, network)
    steps, small = usual.steps if steps is None else steps, usual.small
    real, rates, within = images, [LEARNING_RATE] * steps, None
    if small:
        rates, within = falling(SMALL_LEARNING_RATE, steps), images.aminmax()
        real, tiles = tiles.shrunk(images), tiles.in_small()
    owns = [torch.from_numpy(row).nonzero()[:, 0] for row in members]
    classes = [[own[labels[own] == c] for c in torch.unique(labels)] for own in owns]
    each = own_groups(min(len(c) for own in classes for c in own), per_class)
    groups = [c[g] for own in classes for c in own for g in alike(images[c], each)]
    if previous is None:
        starts = [
            start(init, images[own], labels[own], per_class, _seeded(seed), formation, smooth=small)
            for own in owns
        ]
    else:
        starts = [(own.images, own.labels) for own in previous]
    generator = _seeded(seed)
    most = max(REAL_PER_CLASS // each, REAL_PER_GROUP)
    size = min(REFINE_BANK if network else usual.bank, steps)
    probes = []
    for extract, augment in bank(real.shape, usual, size, seed, network):
        features = features_of(extract, augment, real)
        orders = [torch.randperm(len(g), generator=generator)[:most] for g in groups]
        means = [features[g[o]].mean(0) for g, o in zip(groups, orders, strict=True)]
        probes.append(Probe(extract, augment, torch.stack(means)))
    virtual = torch.cat([first for first, _ in starts])
    virtual = virtual.reshape(len(groups), per_class // each, *images.shape[1:]).clone()
    match_means(virtual, probes, rates, tiles, progress, within=within)
    finished = virtual.reshape(len(members), -1, *images.shape[1:])
    return [
        VirtualData(own, of, "dm", steps, seed, init, initial_images=first, formation=formation)
        for own, (first, of) in zip(finished, starts, strict=True)
    ]


def bank(
    shape: Sequence[int], effort: Effort, size: int, seed: int, network: Network | None = None
) -> list[tuple[Network, Augmentation]]:
    """Networks, or the one, and augmentations for images of shape (..., C, H, W), from the seed."""
    generator = _seeded(seed)
    return [
        draw_pair(shape, effort.width, generator, network=network, all_depths=effort.small)
        for _ in range(size)
    ]


@torch.no_grad()
def features_of(network: Network, augment: Augmentation, images: Tensor) -> Tensor:
    """Features of images, a few at a time."""
    return torch.cat([network(augment(chunk)) for chunk in torch.split(images, 256)])


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
