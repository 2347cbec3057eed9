"""Digits of exact numbers: their sums are the sums of the numbers, and say nothing else."""

from fractions import Fraction

import numpy as np
import pytest

from flwr_distill.links.digits import MAX_EXACT, digits_of, number_of
from flwr_distill.links.masks import MAX_NODES, MAX_VALUE, dequantised, quantised

NUMBERS = [
    *(0, 1, -1, 255, 256, -256, 0.1, -1e-6, 1.75e12, 3e24, 2.0**-512, -(2.0**-512)),
    *(Fraction(2) ** 255 - 1, 1 - Fraction(2) ** 255),
]


def mean_of_digits(numbers):
    """As a secure sum gives it to the server."""
    total = np.zeros((), np.uint64)
    for number in numbers:
        total = total + quantised(digits_of(Fraction(number)), 1)
    return dequantised(total) / len(numbers)


def test_digits_of_any_number_are_within_the_bound_of_a_sum_and_give_it_exactly():
    for number in NUMBERS:
        exact = round(Fraction(number) * 2**512) / Fraction(2**512)
        assert number_of(mean_of_digits([number])) == exact


def test_sums_of_digits_give_the_sum_of_as_many_numbers_as_a_sum_has_nodes():
    draws = np.random.default_rng(0)
    numbers = [float(x) * 10.0 ** int(e) for x, e in draws.normal(0, [1, 20], (MAX_NODES, 2))]
    assert number_of(MAX_NODES * mean_of_digits(numbers)) == pytest.approx(
        sum(map(Fraction, numbers))
    )
    assert number_of(3 * mean_of_digits(NUMBERS[:3])) == 0


@pytest.mark.parametrize("drawn", [b"\x00", b"\xff"])
def test_the_largest_carries_leave_digits_within_the_bound(monkeypatch, drawn):
    monkeypatch.setattr("secrets.token_bytes", lambda count: drawn * count)
    for number in NUMBERS:
        assert np.abs(digits_of(Fraction(number))).max() <= MAX_VALUE


def test_sums_of_digits_do_not_say_how_they_carried():
    """Of 255 and 1 the lowest digit carries, and of 256 and 0 it does not; their sums are one."""
    lowest = [[mean_of_digits(pair)[0] for _ in range(400)] for pair in ((255, 1), (256, 0))]
    (mean, others), spread = np.mean(lowest, axis=1), np.std(lowest)
    assert abs(mean - others) < spread / 3
    assert spread * 2**20 > 2**30  # beside carries of 2^8


@pytest.mark.parametrize("number", [MAX_EXACT, -MAX_EXACT, 1e80])
def test_a_larger_number_is_an_error(number):
    with pytest.raises(ValueError, match="number"):
        digits_of(Fraction(number))
