"""Linear heads in closed form, from sums over samples of frozen features.

Added up over nodes, sums are those of all samples, whichever node has which class, and so is the
head. Everything is computed in float64.
"""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from flwr_distill.distill.errors import DistillError

Floats = NDArray[np.float64]

SLACK = 1e-5
"""Share of the features' summed squares by which sums may contradict each other: they travel
rounded."""
MIN_VARIANCE = 1e-9
"""Of features within classes, so that a few samples have a discriminant, too."""
TAIL = 10.0
"""Standard deviations that noise may have beyond its usual norm."""
SHARES = (0.2, 0.75, 0.05)
"""Shares of gram, class sums and counts in the privacy that is spent on them together."""
STRENGTHS = np.logspace(-5, 2, 29)
"""Ridge penalties to choose from, in units of the greatest eigenvalue of the scatter.

With smaller ones the rounding of sums that travel would show in the head's weights.
"""


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums over samples: all that a head in closed form needs of them.

    `gram` is the sum of ``x x^T`` over features x, (d, d); `by_class` of the features of each
    class, (classes, d); `counts` the samples of each class, (classes,), no whole numbers with
    noise.
    """

    gram: Floats
    by_class: Floats
    counts: Floats

    @classmethod
    def of(cls, features: NDArray[np.floating], labels: NDArray[np.int64], classes: int) -> Self:
        """Sums of features (n, d) with labels (n,)."""
        x = features.astype(np.float64)
        y = np.eye(classes)[labels]
        return cls(x.T @ x, y.T @ x, y.sum(0))

    def __add__(self, other: "Sums") -> "Sums":
        """Sums of both together."""
        return Sums(
            self.gram + other.gram, self.by_class + other.by_class, self.counts + other.counts
        )

    def times(self, factor: float) -> "Sums":
        """Sums in which each sample counts so often."""
        return Sums(factor * self.gram, factor * self.by_class, factor * self.counts)

    @property
    def size(self) -> float:
        """Number of samples; noise does not make it less than 1."""
        return max(float(self.counts.sum()), 1.0)

    def check(self, largest: float, *, whole: bool = True) -> None:
        """Check that samples with these sums can exist, with features of norm `largest` at most.

        Counts need not be `whole` if some samples may count less. Raises ValueError.
        """
        counts = self.counts
        broken = whole and (counts != np.round(counts)).any()
        if (counts < 0).any() or broken or not counts.any():
            raise ValueError("its counts are not numbers of samples")
        if self.by_class[counts == 0].any():
            raise ValueError("it sums features of a class of which it has no sample")
        bound = largest**2 * self.size
        if np.trace(self.gram) > (1 + SLACK) * bound:
            raise ValueError(f"its features are longer than {largest:g}")
        try:  # a covariance has no negative eigenvalue
            np.linalg.cholesky(self.within() + SLACK * bound * np.eye(len(self.gram)))
        except np.linalg.LinAlgError:
            raise ValueError("no samples have these sums") from None

    def with_noise(self, largest: float, noise: float, generator: torch.Generator) -> "Sums":
        """The sums with Gaussian noise: differential privacy of each sample.

        One sample more or less, of norm `largest`, moves them by 1 / `noise` standard deviations at
        most, all together. The generator, on the CPU, must stay secret.
        """

        def drawn(like: Floats) -> Floats:
            values = torch.randn(like.shape, generator=generator, dtype=torch.float64)
            return values.numpy()

        of_gram, of_classes, of_counts = deviations(largest, noise)
        square = drawn(self.gram)
        return Sums(
            # Entries off the diagonal count twice in a matrix's norm, and get half the variance.
            self.gram + of_gram * (square + square.T) / 2,
            self.by_class + of_classes * drawn(self.by_class),
            self.counts + of_counts * drawn(self.counts),
        )

    def check_noisy(self, samples: int, largest: float, noise: float) -> None:
        """Raise ValueError if sums with noise are larger than those of so many samples can be."""
        of_gram, of_classes, of_counts = deviations(largest, noise)
        for name, array, each, deviation in (
            ("products", self.gram, largest**2, of_gram),
            ("class sums", self.by_class, largest, of_classes),
            ("counts", self.counts, 1.0, of_counts),
        ):
            bound = samples * each + deviation * (math.sqrt(array.size) + TAIL)
            if np.linalg.norm(array) > bound:
                raise ValueError(f"its {name} are larger than those of {samples} samples")

    def within(self) -> Floats:
        """Scatter of the features around the means of their classes, (d, d)."""
        return self.gram - self.by_class.T @ (self.by_class / np.maximum(self.counts, 1)[:, None])


@dataclass(frozen=True, eq=False)
class Head:
    """A linear head, ``x -> weight x + bias``: weight (classes, d), bias (classes,)."""

    weight: Floats
    bias: Floats

    def of_projection(self, directions: Floats) -> "Head":
        """The head of features x that this one, of ``directions^T x``, amounts to."""
        return Head(self.weight @ directions.T, self.bias)


def clipped(features: NDArray[np.floating], largest: float) -> Floats:
    """Features (n, d), with those scaled down whose norm is above `largest`."""
    x = features.astype(np.float64)
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    scaled: Floats = x * (largest / np.maximum(norms, largest))
    return scaled


def deviations(largest: float, noise: float) -> tuple[float, float, float]:
    """Standard deviations of the noise on gram, class sums and counts; see `Sums.with_noise`."""
    gram, by_class, counts = (noise / math.sqrt(share) for share in SHARES)
    return gram * largest**2, by_class * largest, counts


def noisy_penalty(d: int, deviation: float) -> float:
    """Penalty of `ridge` on a gram matrix (d, d) with noise: twice the noise's spectral norm.

    As in AdaSSP (Wang 2018), with the known `deviation` of the noise on the diagonal in place of an
    estimate from the data.
    """
    return 2 * deviation * math.sqrt(2 * d)


def ridge(sums: Sums, penalty: float) -> Head:
    """Least squares on one-hot labels, with ``penalty |W|^2`` and an intercept without penalty."""
    mean, centred, moved = _centred(sums)
    penalised = centred + penalty * np.eye(len(centred))
    weight = np.linalg.solve(penalised, moved.T).T.astype(np.float64)
    return Head(weight, sums.counts / sums.size - weight @ mean)


def best_penalty(sums: Sums) -> float:
    """The penalty of `STRENGTHS` with the least generalised cross-validation error.

    That error is leave-one-out's, with the mean leverage in place of each sample's (Golub, Heath
    and Wahba 1979), which sums suffice for: ``n RSS / (n - degrees of freedom)^2``.
    """
    _, centred, moved = _centred(sums)
    values, vectors = np.linalg.eigh(centred)
    values, n = values.clip(min=0), sums.size
    moved_squares = np.square(moved @ vectors).sum(0)
    label_squares = (sums.counts * (1 - sums.counts / n)).sum()
    # Samples that are all alike have no scatter but rounding; those without features have nothing.
    penalties = STRENGTHS * (max(values[-1], SLACK * np.trace(sums.gram)) or 1.0)
    shrunk = values + penalties[:, None]
    residual = label_squares + (moved_squares * (values / shrunk - 2) / shrunk).sum(1)
    left = n - 1 - (values / shrunk).sum(1)
    # More features than samples: without a penalty nothing is left over, and 0 / 0 says nothing.
    errors = np.where(left > n * SLACK, residual / np.maximum(left, n * SLACK) ** 2, np.inf)
    return float(penalties[errors.argmin()])


def discriminant(sums: Sums, shrinkage: float) -> Head:
    """Linear discriminant analysis: Gaussian classes with one covariance.

    A class without samples counts as half a sample at the mean of all. `shrinkage` is the share, in
    (0, 1], of a multiple of the identity with the same trace in the covariance.
    """
    covariance = sums.within() / sums.size
    d = len(covariance)
    shrunk = (1 - shrinkage) * covariance
    shrunk[np.diag_indices(d)] += max(shrinkage * np.trace(covariance) / d, MIN_VARIANCE)
    mean = sums.by_class.sum(0) / sums.size
    present = sums.counts[:, None] >= 1
    means = np.where(present, sums.by_class / np.maximum(sums.counts, 1)[:, None], mean)
    weight = np.linalg.solve(shrunk, means.T).T.astype(np.float64)
    priors = np.maximum(sums.counts, 0.5) / sums.size
    return Head(weight, np.log(priors) - 0.5 * (weight * means).sum(1))


def best_shrinkage(sums: Sums) -> float:
    """Oracle approximating shrinkage of the covariance within classes (Chen et al. 2010, eq. 23).

    Unlike Ledoit and Wolf's it needs no fourth moments, and so nothing but the sums.
    """
    covariance = sums.within() / sums.size
    d, n = len(covariance), sums.size
    square, mean = np.square(covariance).mean(), np.trace(covariance) / d
    spread = (n + 1) * (square - mean**2 / d)
    return 1.0 if spread <= 0 else float(min(1.0, (square + mean**2) / spread))


def solved(head: str, sums: Sums, strength: float) -> Head:
    """The head ``ridge`` or ``lda`` with this penalty or shrinkage."""
    return {"ridge": ridge, "lda": discriminant}[head](sums, strength)


def random_directions(d: int, k: int, seed: int) -> Floats:
    """Directions (d, k) of a Gaussian random projection, that keeps lengths on average."""
    if not 0 < k <= d:
        raise DistillError(f"must be from 1 to the {d} features", where="directions", value=k)
    return np.random.default_rng(seed).standard_normal((d, k)) / math.sqrt(k)


def _centred(sums: Sums) -> tuple[Floats, Floats, Floats]:
    """Mean of the features; their scatter around it; class sums of features less the mean."""
    mean = sums.by_class.sum(0) / sums.size
    centred = sums.gram - sums.size * np.outer(mean, mean)
    return mean, centred, sums.by_class - np.outer(sums.counts, mean)
