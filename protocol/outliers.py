"""Outliers among replies: absurdly large norms of updates and claimed numbers."""

import math
from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from protocol.arrays import Arrays

FEWEST = 4
"""Fewest values among which one can be absurd."""
SMALLEST_SCALE = 1.0
"""Spread of logarithms, a factor e, below which values count as equal."""

K = TypeVar("K")


def update_norm(arrays: Arrays, start: Arrays | None) -> float:
    """L2 norm of a model's floating-point arrays minus ``start`` (zeros if None).

    Each array is read once.
    """
    squares = 0.0
    for name, array in arrays.items():
        if array.dtype.kind == "f":
            change = array.astype(np.float64)
            if start is not None:
                np.subtract(change, start[name], out=change)
            squares += float(np.vdot(change, change))
    return math.sqrt(squares)


def absurdly_large(values: Mapping[K, float], threshold: float) -> list[K]:
    """Keys of values that are absurdly large among the others: outliers of their logarithms.

    A value's score is the distance of its logarithm above their median, in units of
    ``1.4826 MAD`` (the standard deviation, if they were normal), but at least 1.

    Parameters
    ----------
    values : Mapping[K, float]
        Not negative. Zeros are ignored, and fewer than 4 values are not judged.
    threshold : float
        Score above which a value is absurd; 0 turns the check off.
    """
    keys = [key for key, value in values.items() if value > 0]
    if threshold == 0 or len(keys) < FEWEST:
        return []
    logs = np.log([values[key] for key in keys])
    above = logs - np.median(logs)
    scale = max(1.4826 * float(np.median(np.abs(above))), SMALLEST_SCALE)
    return [key for key, score in zip(keys, above / scale, strict=True) if score > threshold]


def capped(num_examples: Mapping[K, int], most: float) -> dict[K, int]:
    """Numbers of samples, of which at most ``most`` times the median count; at least 1 does.

    Parameters
    ----------
    num_examples : Mapping[K, int]
        Samples by node.
    most : float
        In units of the median; 0 counts all.
    """
    if not most or not num_examples:
        return dict(num_examples)
    limit = most * float(np.median(list(num_examples.values())))
    return {key: max(1, int(min(number, limit))) for key, number in num_examples.items()}
