"""Metrics of a classifier from counts alone, which add up over minibatches and nodes.

Functions take arrays with any leading axes, so that resampled counts are scored in one call. Where
nothing is known, they give NaN.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from statistics import NormalDist
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

BINS = 64
"""Bins of a class's probability. They are of equal width in asinh of its log-odds over those of
chance: bins of equal probability would hold nearly all samples of a sure model in two of them."""
LOG_ODDS = 12.0
"""Beyond this size of these log-odds lie the first and the last bin."""
CALIBRATION_BINS = 15
"""Bins of the confidence, of equal width, for the calibration error."""
UNIT = 1000
"""Confidences are summed in whole thousandths."""
MAX_CLASSES = 100
"""Classes for which there are intervals, and for which nodes send counts."""
MAX_SHOWN = 20
"""Classes for which a confusion matrix is recorded and drawn."""
RESAMPLES = 200
LEVEL = 0.95
"""Of bootstrap intervals."""

Integers = NDArray[np.int64]
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Counts:
    """What is known of a model's predictions on some samples.

    Parameters
    ----------
    confusion : array (C, C)
        Samples by true class (row) and predicted class.
    own, others : arrays (C, BINS)
        Samples of each class, and of all others, by the bin of the class's predicted probability.
    calibration : array (3, CALIBRATION_BINS)
        By confidence: samples, the sum of their confidences in thousandths, and correct ones.

    They are whole numbers, but for those of `at_most`.
    """

    confusion: NDArray[Any]
    own: NDArray[Any]
    others: NDArray[Any]
    calibration: NDArray[Any]

    @classmethod
    def from_vector(cls, vector: Integers, classes: int) -> Self:
        """The counts that lie one after the other in a vector of `size(classes)`."""
        ends = np.cumsum([classes**2, classes * BINS, classes * BINS])
        confusion, own, others, calibration = np.split(vector, ends)
        return cls(
            confusion.reshape(classes, classes),
            own.reshape(classes, BINS),
            others.reshape(classes, BINS),
            calibration.reshape(3, CALIBRATION_BINS),
        )

    def to_vector(self) -> Integers:
        """The inverse of `from_vector`."""
        return np.concatenate([part.ravel() for part in self.parts()])

    @classmethod
    def of_confusion(cls, confusion: Integers) -> Self:
        """Counts of which only the confusion matrix is known."""
        classes = len(confusion)
        counts = cls.from_vector(np.zeros(size(classes), np.int64), classes)
        return cls(confusion, counts.own, counts.others, counts.calibration)

    def __add__(self, other: "Counts") -> "Counts":
        """Counts of both sets of samples."""
        return Counts(*(a + b for a, b in zip(self.parts(), other.parts(), strict=True)))

    def at_most(self, samples: int) -> "Counts":
        """Shares of these counts, so that they weigh as so many samples; these, if they are fewer.

        Shares are not rounded: most cells of histograms have few samples.
        """
        if self.samples <= samples:
            return self
        return Counts(*(part * (samples / self.samples) for part in self.parts()))

    def parts(self) -> Iterator[NDArray[Any]]:
        """The four arrays."""
        yield from (self.confusion, self.own, self.others, self.calibration)

    @property
    def samples(self) -> int:
        """How many there are."""
        return round(float(self.confusion.sum()))

    def check(self) -> None:
        """Check that these can be counts of some samples.

        The confusion matrix may be known alone; other counts are then 0. Raises ValueError if not.
        """
        if any((part < 0).any() for part in self.parts()):
            raise ValueError("a count is negative")
        if not any(part.any() for part in (self.own, self.others, self.calibration)):
            return
        sizes = self.confusion.sum(1)
        if (self.own.sum(1) != sizes).any() or (self.others.sum(1) != sizes.sum() - sizes).any():
            raise ValueError("histograms do not add up to the samples of each class")
        samples, confidence, correct = self.calibration
        if samples.sum() != sizes.sum() or correct.sum() != np.trace(self.confusion):
            raise ValueError("calibration bins do not add up to the confusion matrix")
        low = np.arange(CALIBRATION_BINS) * UNIT / CALIBRATION_BINS
        high = low + UNIT / CALIBRATION_BINS
        outside = (confidence < samples * (low - 1)) | (confidence > samples * (high + 1))
        if (correct > samples).any() or outside.any():
            raise ValueError("a calibration bin has more confidence or correct ones than samples")


def size(classes: int) -> int:
    """Length of a vector with all counts of so many classes."""
    return classes**2 + 2 * classes * BINS + 3 * CALIBRATION_BINS


def num_classes(length: int) -> int:
    """Of how many classes a vector of this `size` is."""
    return next(classes for classes in count(1) if size(classes) >= length)


def accuracy(confusion: NDArray[Any]) -> Numbers:
    """Share of correct predictions; of (..., C, C)."""
    hits = confusion.diagonal(axis1=-2, axis2=-1).sum(-1)
    return _ratio(hits, confusion.sum((-2, -1)))


def balanced_accuracy(confusion: NDArray[Any]) -> Numbers:
    """Mean of the accuracy of each class; of (..., C, C). Classes without samples are left out."""
    return _mean(class_accuracy(confusion))


def class_accuracy(confusion: NDArray[Any]) -> Numbers:
    """Share of correct predictions by class; NaN for classes without samples."""
    return _ratio(confusion.diagonal(axis1=-2, axis2=-1), confusion.sum(-1))


def macro_f1(confusion: NDArray[Any]) -> Numbers:
    """Mean over classes of F1, the harmonic mean of precision and recall; of (..., C, C).

    Classes without samples are left out, also where the model predicts them.
    """
    hits, sizes = confusion.diagonal(axis1=-2, axis2=-1), confusion.sum(-1)
    f1 = _ratio(2 * hits, sizes + confusion.sum(-2))
    return _mean(np.where(sizes > 0, f1, np.nan))


def auroc(own: NDArray[Any], others: NDArray[Any]) -> Numbers:
    """Mean over classes of the area under the ROC curve, one against rest; of (..., C, bins).

    Samples in one bin count as ties, half. Classes without samples, or without others, are left
    out.
    """
    below = np.cumsum(others, -1) - others
    wins = (own * (below + others / 2)).sum(-1)
    return _mean(_ratio(wins, own.sum(-1).astype(float) * others.sum(-1)))


def calibration_error(calibration: NDArray[Any]) -> Numbers:
    """Expected calibration error (ECE); of (..., 3, bins).

    The mean over samples of how far a bin's confidence is from its share of correct predictions.
    """
    samples, confidence, correct = np.moveaxis(calibration, -2, 0)
    return _ratio(np.abs(confidence / UNIT - correct).sum(-1), samples.sum(-1))


def scores(counts: Counts) -> dict[str, float]:
    """All metrics of some counts by name."""
    return {name: float(value) for name, value in _scores(*counts.parts()).items()}


def intervals(
    counts: Counts, generator: np.random.Generator, resamples: int = RESAMPLES
) -> dict[str, tuple[float, float]]:
    """Bootstrap intervals (95 %) of all metrics, from counts alone.

    As many samples are drawn again with the shares that were counted. Confusion matrix, histograms
    and calibration bins are drawn each by itself. Within a calibration bin all samples have its
    mean confidence.
    """
    samples, confidence, correct = counts.calibration
    drawn = _resampled(samples, generator, resamples)
    means, shares = (np.nan_to_num(_ratio(part, samples)) for part in (confidence, correct))
    calibration = np.stack([drawn, drawn * means, generator.binomial(drawn, shares)], -2)
    confusion = _resampled(counts.confusion.ravel(), generator, resamples)
    drawn_scores = _scores(
        confusion.reshape(resamples, *counts.confusion.shape),
        _resampled(counts.own, generator, resamples),
        _resampled(counts.others, generator, resamples),
        calibration,
    )
    edges = (1 - LEVEL) / 2, (1 + LEVEL) / 2
    found = {}
    for name, values in drawn_scores.items():
        known = values[np.isfinite(values)]
        low, high = np.quantile(known, edges) if len(known) else (np.nan, np.nan)
        found[name] = float(low), float(high)
    return found


def share_interval(share: float, samples: int) -> tuple[float, float]:
    """Wilson's interval (95 %) of a share of so many samples, which is none of width 0."""
    spread = NormalDist().inv_cdf((1 + LEVEL) / 2) ** 2 / samples
    middle = share + spread / 2
    half = math.sqrt(spread * (share * (1 - share) + spread / 4))
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))


def summary(counts: Counts, generator: np.random.Generator) -> dict[str, Any]:
    """Metrics, intervals and confusion matrix as JSON; None where unknown, or of many classes."""
    values: dict[str, Any] = {
        name: value if np.isfinite(value) else None for name, value in scores(counts).items()
    }
    classes = len(counts.confusion)
    bounds = intervals(counts, generator) if classes <= MAX_CLASSES else {}
    return values | {
        "intervals": {n: list(pair) for n, pair in bounds.items() if np.isfinite(pair).all()},
        "confusion": _whole(counts.confusion).tolist() if classes <= MAX_SHOWN else None,
    }


def _scores(
    confusion: NDArray[Any], own: NDArray[Any], others: NDArray[Any], calibration: NDArray[Any]
) -> dict[str, Numbers]:
    return {
        "accuracy": accuracy(confusion),
        "balanced_accuracy": balanced_accuracy(confusion),
        "macro_f1": macro_f1(confusion),
        "auroc": auroc(own, others),
        "ece": calibration_error(calibration),
    }


def _resampled(counts: NDArray[Any], generator: np.random.Generator, resamples: int) -> Integers:
    """Draw counts (..., bins) again, each row with its sum: (resamples, ..., bins)."""
    totals = counts.sum(-1)
    shares = np.nan_to_num(_ratio(counts, totals[..., None]))
    return generator.multinomial(_whole(totals), shares, size=(resamples, *totals.shape))


def _whole(numbers: NDArray[Any]) -> Integers:
    whole: Integers = np.rint(numbers).astype(np.int64)
    return whole


def _ratio(part: NDArray[Any], whole: NDArray[Any]) -> Numbers:
    """NaN where the whole is 0."""
    whole = np.asarray(whole, float)
    ratio: Numbers = np.full(np.broadcast_shapes(np.shape(part), whole.shape), np.nan)
    np.divide(part, whole, out=ratio, where=whole > 0)
    return ratio


def _mean(values: Numbers) -> Numbers:
    """Mean over the last axis of what is known; NaN if nothing is."""
    known = ~np.isnan(values)
    return _ratio(np.where(known, values, 0).sum(-1), known.sum(-1))
