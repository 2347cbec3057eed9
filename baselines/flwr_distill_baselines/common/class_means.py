"""Means over the samples of each class that a node holds: as records, checked, and averaged."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from flwr_distill.protocol.arrays import Arrays, as_record, finite_arrays
from flwr_distill.protocol.schema import MAX_NUMBER

CLASSES = "classes"
"""Array of a record of means: labels of its classes, int64 (k,), in ascending order."""
COUNTS = "counts"
"""Array of a node's record of means: its samples of each of these classes, int64 (k,)."""

ByClass = Mapping[int, NDArray[np.float32]]
"""Mean of each class, float32 (d,), by label."""


def class_means(
    record: ArrayRecord, widths: Mapping[str, int | None], num_classes: int | None = None
) -> Arrays:
    """Read a node's record of means: labels, counts, and means, float32 (k, d); checked.

    Parameters
    ----------
    widths : Mapping[str, int or None]
        d of each array of means, by its name; None takes any.
    num_classes : int, optional (default: None)
        Labels are below it; None takes any.

    Raises
    ------
    ValueError
        If the record has anything else, or a value is not finite.
    """
    if record.keys() != {CLASSES, COUNTS, *widths}:
        raise ValueError(f"its arrays are not {', '.join((CLASSES, COUNTS, *widths))}")
    arrays = finite_arrays(record)
    labels: NDArray[Any] = arrays[CLASSES]
    counts: NDArray[Any] = arrays[COUNTS]
    if labels.ndim != 1 or labels.dtype != np.int64 or not len(labels):
        raise ValueError(f"its {CLASSES} are {labels.dtype} {labels.shape}, not labels")
    if labels[0] < 0 or (labels[1:] <= labels[:-1]).any():
        raise ValueError(f"its {CLASSES} are not distinct labels in order")
    if num_classes is not None and labels[-1] >= num_classes:
        raise ValueError(f"it has class {labels[-1]}, and there are {num_classes}")
    if counts.shape != labels.shape or counts.dtype != np.int64:
        raise ValueError(f"its {COUNTS} are {counts.dtype} {counts.shape}, not one for each class")
    if (counts < 1).any() or (counts > MAX_NUMBER).any():
        raise ValueError(f"its {COUNTS} are not numbers of samples")
    for name, width in widths.items():
        means = arrays[name]
        wanted = (len(labels), means.shape[-1] if width is None and means.ndim else width)
        if means.shape != wanted or means.dtype != np.float32 or not means.size:
            raise ValueError(
                f"its {name} are {means.dtype} {means.shape}, not float32 with "
                f"{width or 'some'} values for each of {len(labels)} classes"
            )
    return arrays


def check_distributions(means: NDArray[Any], name: str) -> None:
    """Check that each row (k, classes) is a distribution; a ValueError names the array."""
    totals = means.sum(axis=1, dtype=np.float64)
    if (means < 0).any() or not np.allclose(totals, 1.0, atol=1e-3):
        raise ValueError(f"its {name} are not distributions over classes")


def mean_by_class(
    sent: Iterable[tuple[float, Arrays]], name: str
) -> dict[int, NDArray[np.float32]]:
    """Mean of nodes' means of each class, weighted by their samples of it, in float64.

    `sent` are samples of a node that count, and its means as `class_means` reads them. Its samples
    are spread over its classes by its counts.
    """
    sums: dict[int, NDArray[np.float64]] = {}
    totals: dict[int, float] = {}
    for num_examples, arrays in sent:
        shares = arrays[COUNTS] / arrays[COUNTS].astype(np.float64).sum()
        for label, share, mean in zip(arrays[CLASSES].tolist(), shares, arrays[name], strict=True):
            weight = num_examples * float(share)
            sums[label] = sums.get(label, 0.0) + weight * mean.astype(np.float64)
            totals[label] = totals.get(label, 0.0) + weight
    return {label: (total / totals[label]).astype(np.float32) for label, total in sums.items()}


def record_of_means(**means: ByClass) -> ArrayRecord:
    """Record of means by class, for nodes; all of the same classes."""
    labels = sorted(next(iter(means.values())))
    stacked = {name: np.stack([of[label] for label in labels]) for name, of in means.items()}
    return as_record({CLASSES: np.array(labels, np.int64), **stacked})
