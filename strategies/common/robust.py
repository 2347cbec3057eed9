"""Means of models that a minority of hostile nodes cannot turn."""

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flwr_distill.protocol.arrays import Arrays
from flwr_distill.protocol.outliers import room, spread
from flwr_distill.strategies.common.averages import weighted_mean

Rule = Literal["mean", "agreement", "multi-krum", "trimmed-mean"]

FEWEST = 5
"""Fewest models for a rule other than the mean: among fewer, there is no telling who is odd."""
HOSTILE = 0.3
"""Share of hostile nodes that Multi-Krum and the trimmed mean allow for."""
OUTLIER = 3.5
"""Modified z-score above which a value is an outlier (Iglewicz and Hoaglin 1993)."""
MIN_SPREAD_OF_LENGTHS = 0.4
"""Of logarithms: models whose lengths differ by less than 4.1 times are alike. Where two nodes of
ten replace the model, they send five times their length."""
MIN_SPREAD_OF_COSINES = 0.1
"""Models whose usual cosines with the others differ by less than 0.35 are alike."""


def robust_mean(
    rule: Rule,
    weights: Sequence[float],
    models: Sequence[Arrays],
    start: Arrays,
    longest: float = math.inf,
) -> tuple[dict[str, NDArray[np.generic]], NDArray[np.float64]]:
    """Mean of models by a rule; fewer than 5 models are averaged by weight, none beyond `longest`.

    - ``mean``: by weight.
    - ``agreement``: see `agreeing_mean`.
    - ``multi-krum``: by `limited` weight, of those that `multi_krum` selects.
    - ``trimmed-mean``: of each number, without the 30 % (rounded up) at either end; not weighted.

    Parameters
    ----------
    rule : str
        The rule.
    weights : sequence of float
        Samples of each model, > 0.
    models : sequence of Mapping[str, ndarray]
        All with the names, shapes and types of ``start``. Read array by array, so mappings that
        load on access save memory.
    start : Mapping[str, ndarray]
        The model before training.
    longest : float (default: inf)
        With ``agreement``, the distance from the start that no model counts beyond.

    Returns
    -------
    dict[str, ndarray], ndarray
        The mean; and float64 (n,), the weight that each model had, 0 if rejected.
    """
    given = np.asarray(weights, dtype=np.float64)
    if rule == "mean" or (rule != "agreement" and len(models) < FEWEST):
        return _weighted(given, models), given
    if rule == "trimmed-mean":
        return trimmed_mean(models), np.ones(len(models))
    if rule == "multi-krum":
        products = inner_products(models, start)
        chosen = limited(given) * multi_krum(products)
        return _weighted(chosen, models), chosen
    mean, used, _ = agreeing_mean(weights, models, start, longest)
    return mean, used


def agreeing_mean(
    weights: Sequence[float],
    models: Sequence[Arrays],
    start: Arrays,
    longest: float = math.inf,
) -> tuple[dict[str, NDArray[np.generic]], NDArray[np.float64], bool]:
    """Mean of models without those that are clearly out of line: `too_long`, or `apart`.

    By `limited` weight. Models further from the start than `room` times the median, or than
    ``longest``, are moved back to that distance. Returns what `robust_mean` does, and whether
    models are alike enough to recognise one that points back.
    """
    given = np.asarray(weights, dtype=np.float64)
    if len(models) < FEWEST and longest == math.inf:
        return _weighted(given, models), given, True
    products = inner_products(models, start)
    if len(models) < FEWEST:
        kept, most, clear = given, math.inf, True
    else:
        similarity = usual_cosines(products)
        kept, most, clear = limited(given), room(given), tells(similarity)
        kept[too_long(products, given) | apart(similarity)] = 0
    moved = kept * shortening(products, most, longest)
    rest = float((kept - moved).sum())  # to move a model back is to average it with the start
    return _weighted([*moved, rest], [*models, start]), moved, clear


def limited(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weights, of which at most `room` times the median counts, (n,)."""
    return np.minimum(weights, room(weights) * np.median(weights))


def inner_products(models: Sequence[Arrays], start: Arrays) -> NDArray[np.float64]:
    """Inner products of what training changed in floating-point arrays, (n, n)."""
    products = np.zeros((len(models), len(models)))
    for name, before in start.items():
        if before.dtype.kind == "f":
            trained = np.stack([model[name] for model in models])
            flat = np.subtract(trained, before, dtype=np.float64).reshape(len(models), -1)
            products += flat @ flat.T
    return products


def agreement(products: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which models changed in the direction of most others, given `inner_products`; bool (n,).

    A model agrees if it has a positive cosine with as many others as an honest majority gives each
    of its own, ``n // 2``. If less than a majority agrees, there is no common direction, as with
    converged models, and none is rejected.
    """
    n = len(products)
    along = (products > 0).sum(axis=1) - (products.diagonal() > 0)
    agreeing: NDArray[np.bool_] = along >= n // 2
    return agreeing if agreeing.sum() > n // 2 else np.ones(n, dtype=bool)


def too_long(products: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which changes are far longer than others of as many samples, as in model replacement.

    Outliers among the logarithms of lengths, given `inner_products` and samples (n,); bool (n,). A
    model with more samples than the median has room for the square of that: samples that count may
    be capped. Where honest lengths differ much, as with skewed data, hardly any is an outlier.
    """
    lengths = np.sqrt(products.diagonal())
    if not np.median(lengths):
        return np.zeros(len(lengths), dtype=bool)
    logs = np.log(np.maximum(lengths, np.finfo(float).tiny))
    room = 2 * np.log(np.maximum(weights / np.median(weights), 1))
    return _modified_z(logs - room, MIN_SPREAD_OF_LENGTHS) > OUTLIER


def usual_cosines(products: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each change's cosine with its ``n // 2``-th most similar other, (n,).

    That is an honest one as long as most are.
    """
    lengths = np.sqrt(products.diagonal())
    cosines = np.zeros_like(products)
    both = np.outer(lengths, lengths)
    np.divide(products, both, out=cosines, where=both > 0)
    np.fill_diagonal(cosines, -1)
    usual: NDArray[np.float64] = np.sort(cosines, axis=1)[:, -(len(products) // 2)]
    return usual


def apart(similarity: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which changes have far less in common with the others than these have, bool (n,).

    Outliers among the usual cosines: reversed models lead back, flipped labels and backdoors
    elsewhere. Where honest cosines differ much, as with skewed data, none is.
    """
    return _modified_z(-similarity, MIN_SPREAD_OF_COSINES) > OUTLIER


def tells(similarity: NDArray[np.float64]) -> bool:
    """Whether `apart` would find a model that is as far back as the usual one is ahead."""
    usual = float(np.median(similarity))
    return 2 * usual > OUTLIER * spread(similarity, MIN_SPREAD_OF_COSINES)


def _modified_z(values: NDArray[np.float64], least: float) -> NDArray[np.float64]:
    """Distances above the median, in robust standard deviations of at least `least`."""
    scores: NDArray[np.float64] = (values - np.median(values)) / spread(values, least)
    return scores


def shortening(
    products: NDArray[np.float64], most: float, longest: float = math.inf
) -> NDArray[np.float64]:
    """Factor of each change, at most 1, that leaves none longer than `most` times the median, (n,).

    Nor longer than ``longest``. Of an even number, the median is the lower one, which of two is the
    shorter.
    """
    lengths = np.sqrt(products.diagonal())
    if math.isfinite(most):
        longest = min(longest, most * np.sort(lengths)[(len(lengths) - 1) // 2])
    factors = np.ones(len(lengths))
    np.divide(longest, lengths, out=factors, where=lengths > longest)
    return factors


def multi_krum(products: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which models Multi-Krum averages (Blanchard et al. 2017), bool (n,).

    With f hostile ones among n, the ``n - f`` with the least sum of squared distances to their
    ``n - f - 2`` nearest.
    """
    n = len(products)
    hostile = math.ceil(HOSTILE * n)
    squares = products.diagonal()
    distances = squares[:, None] + squares[None, :] - 2 * products
    np.fill_diagonal(distances, np.inf)
    nearest = np.sort(distances, axis=1)[:, : max(n - hostile - 2, 1)]
    selected = np.zeros(n, dtype=bool)
    selected[np.argsort(nearest.sum(axis=1), kind="stable")[: n - hostile]] = True
    return selected


def trimmed_mean(models: Sequence[Arrays]) -> dict[str, NDArray[np.generic]]:
    """Mean of each number without the extremes (Yin et al. 2018)."""
    cut = trimmed(len(models))
    means = {}
    for name, like in models[0].items():
        ordered = np.sort(np.stack([model[name] for model in models]), axis=0)
        mean = ordered[cut : len(models) - cut].mean(axis=0, dtype=np.float64)
        means[name] = (mean if like.dtype.kind == "f" else np.rint(mean)).astype(like.dtype)
    return means


def trimmed(n: int) -> int:
    """How many of n numbers the trimmed mean leaves out at either end."""
    return min(math.ceil(HOSTILE * n), (n - 1) // 2)


def _weighted(weights: Iterable[float], models: Sequence[Arrays]) -> dict[str, NDArray[np.generic]]:
    """Weighted mean of models, of which some may weigh 0."""
    return weighted_mean((w, model) for w, model in zip(weights, models, strict=True) if w > 0)
