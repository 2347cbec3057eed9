"""An audit: how many of a node's images an attacker finds by the virtual data made from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distill.distribution_matching import Network
from distill.errors import DistillError
from distill.formation import Formation
from distill.membership import (
    FEWER,
    Curve,
    Flags,
    Floats,
    Interval,
    curve,
    left_out_scores,
    share_bounds,
    true_positives_at,
)
from distill.privacy import nearer_to_own
from distill.registry import Progress
from distill.shadows import (
    ATTACKS,
    Canaries,
    distil_subsets,
    dm_of_subsets,
    draw_members,
    feature_directions,
    observed,
    with_canaries,
)
from distill.virtual_data import VirtualData

TOGETHER = "all three"
BITS = 4
"""Of a pixel, as nodes send them by default."""
REFRESH_STEPS = 20
"""Of a refresh, as ``hfldd.refresh-steps`` has by default."""


@dataclass(frozen=True)
class Setting:
    """What is audited.

    Parameters
    ----------
    distiller, start : str
        Names, see `distill.registry` and `distill.starts`.
    per_class : int
        Virtual images of a class.
    formation : int (default: 1)
        Smaller images along each side of a virtual one; 0 lets the distiller choose.
    steps : int, optional (default: None)
        None takes the distiller's own.
    refreshes : int (default: 0)
        Times that the virtual data are refined by another network, and sent again.
    """

    distiller: str
    start: str
    per_class: int
    formation: int = 1
    steps: int | None = None
    refreshes: int = 0


class Attacked(NamedTuple):
    """What an attacker finds by each attack.

    Scores have the shape (attacks, sets, n), members (sets, n), kinds of images (n,). `nearer` has
    the shape (3, sets): pixels, features and chance of `Reconstruction`.
    """

    members: Flags
    scores: Floats
    kinds: NDArray[np.str_]
    nearer: Floats


class Reconstruction(NamedTuple):
    """Share of virtual images that are nearer to an image of their set than to any other.

    Of small ones, where an image holds several. The others are ordinary images that the set was not
    made from. Means over the sets, with 95 % intervals of these.

    Parameters
    ----------
    pixels, features : Interval
        By root mean square difference of pixels; of features in random networks.
    by_chance : float
        The share if virtual images tell nothing of single ones.
    """

    pixels: Interval
    features: Interval
    by_chance: float


class Finding(NamedTuple):
    """What one attack finds; shares of the sets' images, with 95 % intervals.

    `worst` has, by kind of canary, the share found where 0.1 % of the same kind are accused
    falsely.
    """

    attack: str
    curve: Curve
    worst: dict[str, Interval]


def attack(
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
) -> Attacked:
    """Distil random halves of some images, and guess each half from what it became.

    Each set is attacked with all others as shadows (LiRA, `distill.membership`). Virtual data are
    seen as they arrive, with 4 bits a pixel; of refreshed ones every version, and what these tell
    is added up.

    Parameters
    ----------
    images, labels : Tensor
        Candidates: float32 (n, C, H, W), int64 (n,).
    num_classes : int
        Of the task.
    sets : int
        Sets, and one more than the shadows of each.
    canaries : int
        Of each kind, see `distill.shadows.with_canaries`.
    seed : int
        Of canaries, halves and draws.
    others : Tensor, optional (default: None)
        Images of other classes, see `distill.shadows.with_canaries`.
    networks : Sequence[Network]
        Features of the model at each refresh, which the attacker knows.

    Raises
    ------
    DistillError
        If there are too few images, or an argument is unusable.
    """
    if len(networks) != setting.refreshes:
        raise DistillError(
            f"{setting.refreshes} refreshes need as many networks, got {len(networks)}"
        )
    chosen = with_canaries(images, labels, canaries, torch.Generator().manual_seed(seed), others)
    members = draw_members(sets, chosen, np.random.default_rng(seed))
    made = distil_subsets(
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
    arrived = [VirtualData.from_bytes(own.to_bytes(BITS)) for own in made]
    scores = _scores(chosen, members, arrived, num_classes, seed)
    for network in networks:
        made = dm_of_subsets(
            chosen.images,
            chosen.labels,
            members,
            per_class=setting.per_class,
            steps=REFRESH_STEPS,
            formation=arrived[0].formation,
            seed=seed,
            network=network,
            made=arrived,
        )
        arrived = [VirtualData.from_bytes(own.to_bytes(BITS)) for own in made]
        scores += _scores(chosen, members, arrived, num_classes, seed, network)
    scores = np.concatenate([scores, scores.sum(axis=0)[None]])
    return Attacked(members, scores, chosen.kinds, _nearer(chosen, members, arrived, seed))


def _nearer(chosen: Canaries, members: Flags, arrived: list[VirtualData], seed: int) -> Floats:
    """Of each set, the shares nearer to its own ordinary images, and by chance: (3, sets)."""
    tiles = Formation.of(arrived[0].formation, chosen.images.shape)
    directions = feature_directions(chosen.images, arrived[0].formation, seed)
    of_real = directions(tiles.coarse(chosen.images))
    usual = torch.from_numpy(chosen.kinds == "usual")
    shares = []
    for row, virtual in zip(torch.from_numpy(members), arrived, strict=True):
        own, others, decoded = row & usual, ~row & usual, virtual.decoded().images
        by_pixels = nearer_to_own(decoded, chosen.images[own], chosen.images[others], tiles)
        by_features = nearer_to_own(directions(decoded), of_real[own], of_real[others])
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


def _scores(
    chosen: Canaries,
    members: Flags,
    arrived: list[VirtualData],
    num_classes: int,
    seed: int,
    network: Network | None = None,
) -> Floats:
    """Of each attack on one version of the virtual data, (attacks, sets, n)."""
    seen = observed(
        chosen.images,
        chosen.labels,
        arrived,
        num_classes=num_classes,
        seed=seed,
        network=network,
    )
    return np.stack([left_out_scores(own, members) for own in seen])


def findings(attacked: Attacked, seed: int = 0) -> list[Finding]:
    """What each attack finds, of usual images and of canaries; the last joins the three."""
    generator = np.random.default_rng(seed)
    return [
        finding(name, attacked.members, scores, attacked.kinds, generator)
        for name, scores in zip((*ATTACKS, TOGETHER), attacked.scores, strict=True)
    ]


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
