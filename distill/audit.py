"""An audit: how many of a node's images an attacker finds by the virtual data made from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from flwr_distill.distill.attacks import ATTACKS, attack_scores, matched_features
from flwr_distill.distill.distribution_matching import Network
from flwr_distill.distill.errors import DistillError
from flwr_distill.distill.formation import Formation
from flwr_distill.distill.membership import (
    FEWER,
    Curve,
    Flags,
    Floats,
    Interval,
    curve,
    share_bounds,
    true_positives_at,
)
from flwr_distill.distill.privacy import nearer_to_own
from flwr_distill.distill.registry import Progress
from flwr_distill.distill.shadows import distil_subsets, dm_of_subsets, draw_members, with_canaries
from flwr_distill.distill.virtual_data import VirtualData

NAMES = (*ATTACKS, "all together")
"""Of the scores of `Attacked`."""
NEARER_NETWORKS = 10
"""By whose features virtual images are compared with single real ones."""
BITS = 4
"""Of a pixel, as nodes send them by default."""
REFRESH_STEPS = 20
"""Of a refresh, as ``hfldd.refresh-steps`` has by default."""


@dataclass(frozen=True)
class Setting:
    """Distiller, start, and numbers of an audited distillation; see `distill.registry.Distiller`.

    `refreshes`: times that the virtual data are refined by another network, and sent again.
    """

    distiller: str
    start: str
    per_class: int
    formation: int = 1
    steps: int | None = None
    refreshes: int = 0


class Halves(NamedTuple):
    """Random halves of some images, and the virtual data of each as it arrives.

    Candidates: float32 (n, C, H, W), int64 (n,), their kinds (n,): "usual", or of canary. Members:
    bool (sets, n). Virtual images, decoded: float32 (1 + refreshes, sets, m, C, H, W), int64 (m,).
    """

    images: Tensor
    labels: Tensor
    kinds: NDArray[np.str_]
    members: Flags
    versions: Tensor
    virtual_labels: Tensor
    formation: int


class Attacked(NamedTuple):
    """Scores (attacks, sets, n), members (sets, n) and kinds of images (n,).

    `nearer` has the shape (3, sets): pixels, features and chance of `Reconstruction`.
    """

    members: Flags
    scores: Floats
    kinds: NDArray[np.str_]
    nearer: Floats


class Reconstruction(NamedTuple):
    """Share of virtual images that are nearer to an image of their set than to other ordinary ones.

    By pixels (root mean square), by features of random networks, and by chance; means over sets.
    """

    pixels: Interval
    features: Interval
    by_chance: float


class Finding(NamedTuple):
    """What one attack finds; shares of the sets' images, with 95 % intervals.

    `worst`: by kind of canary, the share found where 0.1 % of the same kind are accused falsely.
    """

    attack: str
    curve: Curve
    worst: dict[str, Interval]


def distilled_halves(
    images: Tensor,
    labels: Tensor,
    setting: Setting,
    *,
    num_classes: int,
    sets: int,
    canaries: int,
    seed: int,
    progress: Progress | None = None,
    others: Tensor | None = None,
    networks: Sequence[Network] = (),
) -> Halves:
    """Distil random halves of some images (n, C, H, W); virtual data arrive with 4 bits a pixel.

    `sets` halves, one more than the shadows of each, with `canaries` of each kind
    (`distill.shadows.with_canaries`, also for `others`). `seed` is of canaries, halves and draws;
    `networks` are the model's features at each refresh.

    Raises
    ------
    DistillError
        If there are too few images, or an argument is unusable.
    """
    if len(networks) != setting.refreshes:
        problem = f"needs as many networks, got {len(networks)}"
        raise DistillError(problem, where="refreshes", value=setting.refreshes)
    chosen = with_canaries(images, labels, canaries, torch.Generator().manual_seed(seed), others)
    members = draw_members(sets, chosen, np.random.default_rng(seed))
    virtual = distil_subsets(
        setting.distiller,
        chosen.images,
        chosen.labels,
        members,
        num_classes=num_classes,
        per_class=setting.per_class,
        init=setting.start,
        steps=setting.steps,
        formation=setting.formation,
        seed=seed,
        progress=progress,
    )
    arrived = _sent(virtual)
    versions = [_decoded(arrived)]
    for network in networks:
        virtual = dm_of_subsets(
            chosen.images,
            chosen.labels,
            members,
            per_class=setting.per_class,
            steps=REFRESH_STEPS,
            formation=arrived[0].formation,
            seed=seed,
            network=network,
            previous=arrived,
        )
        arrived = _sent(virtual)
        versions.append(_decoded(arrived))
    return Halves(
        chosen.images,
        chosen.labels,
        chosen.kinds,
        members,
        torch.stack(versions),
        arrived[0].decoded().labels,
        arrived[0].formation,
    )


def _sent(virtual: Sequence[VirtualData]) -> list[VirtualData]:
    """Virtual data as they arrive."""
    return [VirtualData.from_bytes(own.to_bytes(BITS)) for own in virtual]


def _decoded(arrived: Sequence[VirtualData]) -> Tensor:
    return torch.stack([own.decoded().images for own in arrived])


def attack(
    halves: Halves,
    *,
    num_classes: int,
    seed: int,
    networks: Sequence[Network] = (),
    progress: Progress | None = None,
) -> Attacked:
    """Attack each half with all others as shadows (`distill.attacks`), knowing all arguments.

    Each seventh score joins six attacks. Refreshed data is attacked with all versions, and with the
    first alone.
    """
    parts = []
    for known in (networks, ()) if networks else ((),):
        scores = attack_scores(
            halves.images,
            halves.labels,
            halves.members,
            halves.versions[: 1 + len(known)],
            halves.virtual_labels,
            num_classes=num_classes,
            formation=halves.formation,
            seed=seed,
            networks=known,
            progress=progress,
        )
        parts += [scores, scores.sum(axis=0)[None]]
    scores = np.concatenate(parts)
    return Attacked(halves.members, scores, halves.kinds, _nearer(halves, seed))


def _nearer(halves: Halves, seed: int) -> Floats:
    """Of each set, the shares nearer to its own ordinary images, and by chance: (3, sets)."""
    tiles = Formation.of(halves.formation, halves.images.shape)
    features = matched_features(halves.images, halves.formation, seed, networks=NEARER_NETWORKS)
    middle = features(halves.images).mean(0)

    def directions(images: Tensor) -> Tensor:
        return functional.normalize(features(images) - middle)

    of_real = directions(tiles.coarse(halves.images))
    usual = torch.from_numpy(halves.kinds == "usual")
    shares = []
    for row, virtual in zip(torch.from_numpy(halves.members), halves.versions[-1], strict=True):
        own, others = row & usual, ~row & usual
        by_pixels = nearer_to_own(virtual, halves.images[own], halves.images[others], tiles)
        by_features = nearer_to_own(directions(virtual), of_real[own], of_real[others])
        shares.append([by_pixels, by_features, float(own.sum() / usual.sum())])
    return np.array(shares).T


def reconstruction(attacked: Attacked) -> Reconstruction:
    """How often virtual images come nearest to what they were made from."""
    pixels, features, by_chance = attacked.nearer
    return Reconstruction(_mean(pixels), _mean(features), float(by_chance.mean()))


def _mean(shares: Floats) -> Interval:
    """Mean of the sets, and its 95 % interval by their deviation."""
    mean = float(shares.mean())
    half = 1.96 * float(shares.std(ddof=1)) / len(shares) ** 0.5
    return Interval(mean, max(mean - half, 0.0), min(mean + half, 1.0))


def names_of(attacked: Attacked) -> list[str]:
    """Of its attacks."""
    first = [f"{name}, first version" for name in NAMES]
    return [*NAMES, *first][: len(attacked.scores)]


def findings(attacked: Attacked, seed: int = 0) -> list[Finding]:
    """What each attack finds, of usual images and of canaries; "all together" joins them."""
    generator = np.random.default_rng(seed)
    return [
        finding(name, attacked.members, scores, attacked.kinds, generator)
        for name, scores in zip(names_of(attacked), attacked.scores, strict=True)
    ]


def strongest(results: Sequence[Finding]) -> Finding:
    """The most that any attack finds, number by number; named after that at 1 % accused.

    The best of several is a little above each where all of them guess.
    """
    best = max(results, key=lambda own: own.curve.at_1pct)
    measures = zip(*(own.curve for own in results), strict=True)
    worst = {kind: max(own.worst[kind] for own in results) for kind in best.worst}
    return Finding(best.attack, Curve(*map(max, measures)), worst)


def finding(
    name: str,
    members: Flags,
    scores: Floats,
    kinds: NDArray[np.str_],
    generator: np.random.Generator,
) -> Finding:
    """What one attack finds, by members and scores (sets, n) and kinds of images (n,)."""
    usual = kinds == "usual"
    worst = {
        str(kind): found_of(members[:, kinds == kind], scores[:, kinds == kind])
        for kind in np.unique(kinds)
        if kind != "usual"
    }
    return Finding(name, curve(members[:, usual], scores[:, usual], generator), worst)


def found_of(members: Flags, scores: Floats) -> Interval:
    """Share of members found where 0.1 % of others are accused; bounds of Clopper and Pearson.

    Bounds take guesses for independent, and the threshold for given.
    """
    share = true_positives_at(FEWER, members.ravel(), scores.ravel())
    trials = int(members.sum())
    return Interval(share, *share_bounds(round(share * trials), trials))
