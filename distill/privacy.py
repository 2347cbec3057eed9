"""The privacy card: how close virtual images come to the real ones they were made from."""

import math
from dataclasses import dataclass, fields
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional

from flwr_distill.distill.errors import DistillError, VirtualDataError, require
from flwr_distill.distill.formation import Formation

P = TypeVar("P")
CHUNK_FLOATS = 2**24
"""Largest tensor in a comparison, 64 MB, unless the virtual images alone are larger."""


@dataclass(frozen=True)
class Closeness:
    """Closeness of virtual images to a set of images, each to its nearest one.

    Distances are root mean squares in units of normalised pixels; 0 is a copy. Cosines are between
    images as vectors; 1 is a copy up to contrast.
    """

    least_distance: float
    median_distance: float
    highest_cosine: float
    median_cosine: float

    def __post_init__(self) -> None:
        _require_numbers(self)
        ordered = 0 <= self.least_distance <= self.median_distance
        require(ordered, "must be ordered and >= 0", where="distances", value=self)
        ordered = -1 <= self.median_cosine <= self.highest_cosine <= 1
        require(ordered, "must be ordered and lie in [-1, 1]", where="cosines", value=self)


@dataclass(frozen=True)
class Yardstick:
    """Closeness of virtual images to held-back real images, which they cannot reveal.

    `nearer_to_own` is the share of virtual images that are closer to an image they were made from
    than to any held-back one; ties count one half. `by_chance` is its expectation if virtual images
    reveal nothing about single images: the share of own images among all real ones.
    """

    held_back: Closeness
    nearer_to_own: float
    by_chance: float

    def __post_init__(self) -> None:
        require(isinstance(self.held_back, Closeness), "must be there", where="held_back")
        for name in ("nearer_to_own", "by_chance"):
            share = getattr(self, name)
            within = isinstance(share, float) and 0 <= share <= 1
            require(within, "must lie in [0, 1]", where=name, value=share)


@dataclass(frozen=True)
class Guarantee:
    """Differential privacy of each image that virtual ones were made from."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        _require_numbers(self)
        require(self.epsilon > 0, "must be > 0", where="epsilon", value=self.epsilon)
        require(0 < self.delta < 1, "must be between 0 and 1", where="delta", value=self.delta)


@dataclass(frozen=True)
class PrivacyCard:
    """What virtual images reveal about single real ones: either `own` or a `guarantee`.

    Closeness is measured and proves nothing: an image may reveal real ones without looking like
    any. Images with a guarantee are not measured, as that would leak information about the real
    ones.

    `own` is to the nearest of the images that the virtual ones were made from, `start` of each
    virtual image to its initial image, `yardstick` to held-back ones. Raises `VirtualDataError` if
    a value, here or in a part, is out of range.
    """

    own: Closeness | None = None
    start: Closeness | None = None
    yardstick: Yardstick | None = None
    guarantee: Guarantee | None = None

    def __post_init__(self) -> None:
        either = (self.own is None) != (self.guarantee is None)
        require(either, "must have either closeness or a guarantee", where="card", value=self)

    def numbers(self) -> dict[str, float]:
        """What the card says of the real images, for a reply's metrics."""
        metrics: dict[str, float] = {}
        if own := self.own:
            metrics["highest-cosine"] = own.highest_cosine
            metrics["median-cosine"] = own.median_cosine
            metrics["least-distance"] = own.least_distance
            metrics["median-distance"] = own.median_distance
        if shares := self.yardstick:
            metrics["nearer-to-own"] = shares.nearer_to_own
            metrics["by-chance"] = shares.by_chance
        if self.guarantee:
            metrics["virtual-epsilon"] = self.guarantee.epsilon
        return metrics

    @classmethod
    def from_dict(cls, content: object) -> "PrivacyCard":
        """Read the output of `dataclasses.asdict`; malformed content is a VirtualDataError."""
        try:
            return _read(cls, content)
        except TypeError as error:
            raise VirtualDataError(f"malformed: {error}", where="privacy card") from error


_PARTS: dict[str, type] = {
    **dict.fromkeys(("own", "start", "held_back"), Closeness),
    "yardstick": Yardstick,
    "guarantee": Guarantee,
}
"""Types of a card's parts, by name."""


@torch.no_grad()
def privacy_card(
    virtual: Tensor,
    real: Tensor,
    *,
    start: Tensor | None = None,
    held_back: Tensor | None = None,
    formation: Formation | None = None,
) -> PrivacyCard:
    """Compare virtual images with real ones, their initial images and held-back images.

    Images are (m, C, H, W). Compares with all real ones, whatever their class, on the device of
    `virtual`. Costs two matrix products of len(virtual) x pixels x len(real), in chunks of bounded
    memory. A formation makes real and held-back images coarse first, as those of its tiles are.

    Raises
    ------
    DistillError
        If shapes do not match.
    """
    for name, other in [("real", real), ("start", start), ("held_back", held_back)]:
        if other is not None and other.shape[1:] != virtual.shape[1:]:
            raise DistillError(
                f"virtual images have {tuple(virtual.shape[1:])}; compare images of one kind",
                where=f"shape of {name} images",
                value=tuple(other.shape[1:]),
            )
    if start is not None and len(start) != len(virtual):
        problem = f"must be {len(virtual)}, one for each virtual image"
        raise DistillError(problem, where="start images", value=len(start))
    distance, cosine = nearest(virtual, real, formation)
    return PrivacyCard(
        own=_closeness(distance, cosine),
        start=None if start is None else _closeness(*_pairwise(virtual, start.to(virtual.device))),
        yardstick=(
            None
            if held_back is None or not len(held_back)
            else _yardstick(virtual, held_back, formation, distance, len(real))
        ),
    )


def nearest(
    virtual: Tensor, others: Tensor, formation: Formation | None = None
) -> tuple[Tensor, Tensor]:
    """Least root mean square difference (n,) and highest cosine (n,) to the nearest other.

    Infinity and -1 where there are no others.
    """
    images = virtual.flatten(1)
    directions = functional.normalize(images)
    middle = images.mean(0)  # centring loses least precision in float32
    centred = images - middle
    distance = torch.full((len(images),), math.inf, device=images.device)
    cosine = torch.full_like(distance, -1)
    rows = max(1, CHUNK_FLOATS // max(images.shape))
    for chunk in torch.split(others, rows) if len(others) else ():
        seen = chunk.to(images)
        candidates = (seen if formation is None else formation.coarse(seen)).flatten(1)
        others_centred = candidates - middle
        squares = others_centred.square().sum(1) - 2 * centred @ others_centred.mT
        # From the difference itself, not the products: a copy gets exactly 0.
        closest = candidates[squares.argmin(1)]
        distance = torch.minimum(distance, _root_mean_square(images - closest))
        cosine = torch.maximum(cosine, (directions @ functional.normalize(candidates).mT).amax(1))
    return distance, cosine.clamp(-1, 1)


def nearer_to_own(
    virtual: Tensor, own: Tensor, others: Tensor, formation: Formation | None = None
) -> float:
    """Share of virtual images nearer to one of `own` than to any of `others`; see `Yardstick`."""
    return _share_nearer(
        nearest(virtual, own, formation)[0], nearest(virtual, others, formation)[0]
    )


def _share_nearer(to_own: Tensor, to_others: Tensor) -> float:
    """Share of first distances (n,) that are less than the second; ties count one half."""
    return float(((to_own < to_others).double() + 0.5 * (to_own == to_others).double()).mean())


def _pairwise(virtual: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    images, others = virtual.flatten(1), start.flatten(1)
    cosine = (functional.normalize(images) * functional.normalize(others)).sum(1)
    return _root_mean_square(images - others), cosine.clamp(-1, 1)


def _root_mean_square(differences: Tensor) -> Tensor:
    return differences.square().mean(1).sqrt()


def _closeness(distance: Tensor, cosine: Tensor) -> Closeness:
    return Closeness(
        least_distance=float(distance.min()),
        median_distance=float(distance.median()),
        highest_cosine=float(cosine.max()),
        median_cosine=float(cosine.median()),
    )


def _yardstick(
    virtual: Tensor,
    held_back: Tensor,
    formation: Formation | None,
    distance_to_own: Tensor,
    num_own: int,
) -> Yardstick:
    distance, cosine = nearest(virtual, held_back, formation)
    return Yardstick(
        held_back=_closeness(distance, cosine),
        nearer_to_own=_share_nearer(distance_to_own, distance),
        by_chance=num_own / (num_own + len(held_back)),
    )


def _read(kind: type[P], content: object) -> P:
    """A dataclass, and its parts, from a mapping with exactly its keys."""
    names = [field.name for field in fields(cast(Any, kind))]
    if not isinstance(content, dict) or set(content) != set(names):
        raise TypeError(f"a {kind.__name__} has {', '.join(names)}; got {content!r:.200}")
    parts = {name: part for name, part in content.items() if name in _PARTS and part is not None}
    return kind(**content | {name: _read(_PARTS[name], part) for name, part in parts.items()})


def _require_numbers(measured: Closeness | Guarantee) -> None:
    for field in fields(measured):
        value = getattr(measured, field.name)
        finite = isinstance(value, float) and math.isfinite(value)
        require(finite, "must be a finite number", where=field.name, value=value)
