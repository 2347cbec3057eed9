"""Outliers among replies: absurd norms of updates and claimed numbers."""

import math
from collections.abc import Mapping
from statistics import median_low
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from flwr_distill.protocol.arrays import Arrays

MIN_NODES = 4
"""Fewest values among which one can be absurd."""
MIN_SCALE = 1.0
"""Spread of logarithms, a factor e, below which values count as equal."""
IDLE = 1e-3
"""Share of the median norm below which a node has learnt nothing. One with 12 samples beside nodes
of 1,200 moves by a fortieth of their norm."""
ORDINARY = 1.5
"""Times the median by which numbers of samples may differ in any federation."""

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
            squares += float(np.einsum("i,i", change.ravel(), change.ravel()))  # in one thread
    return math.sqrt(squares)


def absurdly_large(values: Mapping[K, float], threshold: float) -> list[K]:
    """Keys of values that are absurdly large among the others: outliers of their logarithms.

    A value's score is the distance of its logarithm above their median, in units of
    ``1.4826 MAD`` (the standard deviation, if they were normal), but at least 1. Zeros are ignored,
    and fewer than 4 values are not judged. A `threshold` of 0 turns the check off.
    """
    keys = [key for key, value in values.items() if value > 0]
    if threshold == 0 or len(keys) < MIN_NODES:
        return []
    logs = np.log([values[key] for key in keys])
    above = logs - np.median(logs)
    scale = max(1.4826 * float(np.median(np.abs(above))), MIN_SCALE)
    return [key for key, score in zip(keys, above / scale, strict=True) if score > threshold]


def idle(norms: Mapping[K, float]) -> list[K]:
    """Keys of updates that are next to nothing beside the others: what free riders send.

    Below a thousandth of the median, the lower one of an even number, which two in four that send
    long updates cannot raise.
    """
    least = IDLE * median_low(norms.values()) if norms else 0.0
    return [key for key, norm in norms.items() if norm < least]


def capped(num_examples: Mapping[K, int], most: float) -> dict[K, int]:
    """Numbers of samples that count, by node: claims, of which none exceeds the others' by far.

    At most `room` times the median: where nodes claim alike, one that claims a thousand times as
    many weighs little more than they do. Claims of less than half of the nodes hardly move that
    bound. Of an even number the median is the lower one, which the larger claim of two cannot
    raise. `most` is the factor that counts even where claims differ more; 0 counts all.
    """
    if not most or not num_examples:
        return dict(num_examples)
    claims = np.maximum(np.array(list(num_examples.values()), dtype=np.float64), 1)
    limit = min(most, max(room(claims), ORDINARY)) * median_low(claims)
    return {key: max(1, int(min(number, limit))) for key, number in num_examples.items()}


def room(weights: NDArray[np.float64]) -> float:
    """Times the median that a model may weigh and be long, at least 1, given samples (n,) > 0.

    One robust standard deviation of their logarithms: 1 among nodes of as many samples, more where
    they differ, so that honest ones that have more count for more. Claims of less than half of the
    nodes hardly raise it.
    """
    return math.exp(spread(np.log(weights), 0))


def spread(values: NDArray[np.float64], least: float) -> float:
    """Robust standard deviation, at least `least`."""
    return max(1.4826 * float(np.median(np.abs(values - np.median(values)))), least)
