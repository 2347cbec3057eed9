"""How far a test accuracy might be off, by bootstrap over the test samples."""

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95


def half_interval(accuracy: float, num_samples: int, seed: int = 0) -> float:
    """Half the 95 % interval of an accuracy, both in percent, over resampled test samples.

    How many answers of a resample are right is a binomial draw, so that single answers need not be
    known.
    """
    draws = np.random.default_rng(seed).binomial(num_samples, accuracy / 100, RESAMPLES)
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(100 * (high - low) / 2 / num_samples)
