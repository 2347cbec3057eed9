"""Means and sums over models."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_distill.protocol.arrays import Arrays


def weighted_mean(models: Iterable[tuple[float, Arrays]]) -> dict[str, NDArray[np.generic]]:
    """Mean of models, weighted by numbers of samples (FedHEAD, eq. 9-10).

    Over a sector ``w_m = sum_k (p_km / p_m) w_km``, over sectors ``z = sum_m p_m w_m``: both in
    turn are FedAvg over all nodes.

    Parameters
    ----------
    models : iterable of (float, Mapping[str, ndarray])
        Weight > 0 and arrays of each model, all of the same shapes; one array of one model is in
        memory at a time.

    Returns
    -------
    dict[str, ndarray]
        Of the models' types, summed in float64; whole numbers are rounded.

    Raises
    ------
    ValueError
        If there are no models.
    """
    models = list(models)
    if not models:
        raise ValueError("no models to take the mean of")
    total = sum(weight for weight, _ in models)
    return {name: _mean_of_one(name, models, total) for name in models[0][1]}


def _mean_of_one(
    name: str, models: Sequence[tuple[float, Arrays]], total: float
) -> NDArray[np.generic]:
    first = models[0][1][name]
    mean = np.zeros(first.shape)
    for weight, arrays in models:
        mean += np.multiply(arrays[name], weight, dtype=np.float64)
    mean /= total
    return (mean if first.dtype.kind == "f" else np.rint(mean)).astype(first.dtype)


def summed_change(name: str, start: Arrays, models: Iterable[tuple[float, Arrays]]) -> Any:
    """``sum_i f_i (w_i - w)`` of one array, in float64; one model is in memory at a time."""
    change = np.zeros(start[name].shape)
    for factor, arrays in models:
        change += factor * np.subtract(arrays[name], start[name], dtype=np.float64)
    return change
