"""Means and sums over models."""

from collections.abc import Iterable
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
        Weight > 0 and arrays of each model, all of the same shapes; one is in memory at a time.

    Returns
    -------
    dict[str, ndarray]
        Of the models' types, summed in float64; whole numbers are rounded.

    Raises
    ------
    ValueError
        If there are no models.
    """
    sums: dict[str, NDArray[np.float64]] = {}
    types: dict[str, np.dtype[np.generic]] = {}
    total = 0.0
    for weight, arrays in models:
        total += weight
        for name, array in arrays.items():
            if name not in sums:
                sums[name], types[name] = np.zeros(array.shape), array.dtype
            sums[name] += np.multiply(array, weight, dtype=np.float64)
    if not sums:
        raise ValueError("no models to take the mean of")
    means = {}
    for name, type_ in types.items():
        mean = sums.pop(name) / total
        means[name] = (mean if type_.kind == "f" else np.rint(mean)).astype(type_)
    return means


def summed_change(name: str, start: Arrays, models: Iterable[tuple[float, Arrays]]) -> Any:
    """``sum_i f_i (w_i - w)`` of one array, in float64; one model is in memory at a time."""
    change = np.zeros(start[name].shape)
    for factor, arrays in models:
        change += factor * np.subtract(arrays[name], start[name], dtype=np.float64)
    return change
