"""Counts of a node's held-out samples that a reply to ``evaluate`` may bring (``evaluate.counts``).

They are whole numbers in a config record: what nodes send adds up to the federation's.
"""

import math
from typing import Annotated, Literal, get_args

import numpy as np
from flwr.app import ConfigRecord
from pydantic import Field

from flwr_distill.task.scores import BINS, CALIBRATION_BINS, MAX_CLASSES, Counts, size
from flwr_distill.task.settings import Block

COUNTS = "counts"
"""The record, and the policy's key."""
WITHHELD = "withheld"
Reason = Literal["policy", "few", "privacy", "budget", "classes", "malformed"]
REASONS: dict[Reason, str] = {
    "policy": "its policy has counts: never",
    "few": "a class has fewer samples held out than its policy's fewest-held-out-of-a-class",
    "privacy": "the run has differential privacy, and its policy no counts-epsilon",
    "budget": "its policy's most-epsilon has no room for counts-epsilon",
    "classes": f"there are more than {MAX_CLASSES} classes",
    "malformed": "its app made none that are usable",
}
"""Why a node sends none."""

Count = Annotated[int, Field(strict=True, ge=0, le=10**14)]
Histograms = Annotated[tuple[Count, ...], Field(strict=False, max_length=MAX_CLASSES * BINS)]


class CountsReport(Block):
    """The record: all counts, the confusion matrix alone (with noise), or why there are none.

    Matrices are row by row; see `task.scores.Counts`.
    """

    confusion: Annotated[tuple[Count, ...], Field(strict=False, max_length=MAX_CLASSES**2)] = ()
    own: Histograms = ()
    others: Histograms = ()
    calibration: Annotated[
        tuple[Count, ...], Field(strict=False, max_length=3 * CALIBRATION_BINS)
    ] = ()
    withheld: Reason | None = None


def counts_record(counts: Counts, *, confusion_alone: bool = False) -> ConfigRecord:
    """The record of counts."""
    names = ("confusion",) if confusion_alone else ("confusion", "own", "others", "calibration")
    parts = zip(names, counts.parts(), strict=False)
    return ConfigRecord({name: part.ravel().tolist() for name, part in parts})


def no_counts(reason: Reason) -> ConfigRecord:
    """The record of a node that sends none."""
    return ConfigRecord({WITHHELD: reason})


def why_withheld(record: ConfigRecord) -> Reason | None:
    """The reason in a record; None if it brings counts, or another word."""
    reason = record.get(WITHHELD)
    return next((known for known in get_args(Reason) if known == reason), None)


def read_counts(record: ConfigRecord, classes: int | None = None) -> Counts:
    """The counts in a record, checked: of so many classes, and of some samples.

    Without `classes` the confusion matrix says how many there are. Raises ValueError if they are
    malformed, or cannot be counts of any samples.
    """
    report = CountsReport.checked(record, COUNTS)
    if classes is None:
        classes = math.isqrt(len(report.confusion))
    others = [*report.own, *report.others, *report.calibration]
    if not report.confusion or len(report.confusion) != classes**2:
        raise ValueError(f"the confusion matrix is not of {classes} classes")
    if others and len(others) + classes**2 != size(classes):
        raise ValueError(f"histograms are not of {classes} classes")
    if others and not len(report.own) == len(report.others) == classes * BINS:
        raise ValueError(f"histograms are not of {classes} classes")
    rest = others or [0] * (size(classes) - classes**2)
    # Sums of so many counts, of 10^14 each at most, stay below 2^63.
    counts = Counts.from_vector(np.array([*report.confusion, *rest], np.int64), classes)
    counts.check()
    if not counts.samples:
        raise ValueError("they are of no samples")
    return counts
