"""Bootstrap of a test accuracy, and what FedHEAD's printed deviations are."""

import math

import numpy as np
import pytest

from benchmarks.papers.bootstrap import half_interval
from benchmarks.papers.facts import read_facts

TEST_SAMPLES = {"SVHN": 26_032, "CIFAR10": 10_000, "CIFAR100": 10_000, "AG News": 7_600}


def test_the_interval_is_that_of_resampled_answers():
    right = np.arange(500) < 340
    rng = np.random.default_rng(1)
    means = [100 * rng.choice(right, 500).mean() for _ in range(4000)]
    low, high = np.quantile(means, [0.025, 0.975])
    assert half_interval(68.0, 500) == pytest.approx((high - low) / 2, abs=0.25)
    assert half_interval(68.0, 500, seed=3) == half_interval(68.0, 500, seed=3)
    assert half_interval(100.0, 500) == 0


def test_fedheads_deviations_are_of_the_mean_of_200_resamples():
    """As its published code computes them; the accuracy itself is sqrt(200) times as uncertain."""
    printed = [
        (cell.place.get("dataset", table.dataset), cell.numbers)
        for table in read_facts()["fedhead"].tables
        for cell in table.cells
        if "deviation" in cell.numbers
    ]
    known = [(TEST_SAMPLES[name], numbers) for name, numbers in printed if name in TEST_SAMPLES]
    assert len(known) > 90
    for size, numbers in known:
        expected = half_interval(numbers["value"], size) / math.sqrt(200)
        assert numbers["deviation"] == pytest.approx(expected, abs=0.02)
