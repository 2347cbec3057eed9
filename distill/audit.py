"""An audit: how many of a node's images an attacker finds by the virtual data made from them."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
from distill.registry import Progress
from distill.shadows import ATTACKS, distil_subsets, draw_members, observed, with_canaries

TOGETHER = "all three"
BITS = 4
"""Of a pixel, as nodes send them by default."""


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
    """

    distiller: str
    start: str
    per_class: int
    formation: int = 1
    steps: int | None = None


class Attacked(NamedTuple):
    """What an attacker finds by each attack.

    Scores have the shape (attacks, sets, n), members (sets, n), kinds of images (n,).
    """

    members: Flags
    scores: Floats
    kinds: NDArray[np.str_]


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
) -> Attacked:
    """Distil random halves of some images, and guess each half from what it became.

    Each set is attacked with all others as shadows (LiRA, `distill.membership`). Virtual data are
    seen as they arrive, with 4 bits a pixel.

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

    Raises
    ------
    DistillError
        If there are too few images, or an argument is unusable.
    """
    chosen = with_canaries(images, labels, canaries, torch.Generator().manual_seed(seed))
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
    arrived = [type(own).from_bytes(own.to_bytes(BITS)) for own in made]
    seen = observed(chosen.images, chosen.labels, arrived, num_classes=num_classes, seed=seed)
    scores = np.stack([left_out_scores(own, members) for own in seen])
    return Attacked(members, np.concatenate([scores, scores.sum(axis=0)[None]]), chosen.kinds)


def findings(attacked: Attacked, seed: int = 0) -> list[Finding]:
    """What each attack finds, of usual images and of canaries; the last joins the three."""
    generator = np.random.default_rng(seed)
    usual = attacked.kinds == "usual"
    found = []
    for name, scores in zip((*ATTACKS, TOGETHER), attacked.scores, strict=True):
        worst = {
            str(kind): found_of(attacked.members[:, of], scores[:, of])
            for kind in np.unique(attacked.kinds)
            if (of := attacked.kinds == kind).any() and kind != "usual"
        }
        of_usual = curve(attacked.members[:, usual], scores[:, usual], generator)
        found.append(Finding(name, of_usual, worst))
    return found


def found_of(members: Flags, scores: Floats) -> Interval:
    """Share of members found where 0.1 % of others are accused; bounds of Clopper and Pearson.

    Bounds take guesses for independent, and the threshold for given.
    """
    share = true_positives_at(FEWER, members.ravel(), scores.ravel())
    trials = int(members.sum())
    return Interval(share, *share_bounds(round(share * trials), trials))
