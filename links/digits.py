"""Exact numbers in secure sums: any number as digits that are each within a sum's bound.

A number is a count of units of 2^-512, of 768 bits with its sign, in digits of 8 bits. Sums of
digits give the sum of numbers without rounding, but also show how much each digit carries to the
next. Each node therefore moves random carries, below 2^27, between its neighbouring digits, which
do not change its number; those of 100 nodes' digits are below 100. So what digits say of two sets
of numbers with one sum differs with a probability of at most 96 * 100 / 2^27, less than 1 in
10,000.

Any float64 from 1e-60 to 1e38 has an exact square here: columns need no unit or bound of their own.
"""

import secrets
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from flwr_distill.links.masks import FRACTION_BITS

NUM_DIGITS = 96
"""Digits of a number, the lowest first; the highest has the sign."""
MAX_EXACT = 2.0**255
"""Bound on numbers, exclusive."""
_UNIT_BITS = 512
_DIGIT_BITS = 8
_CARRY_BITS = 27


def digits_of(number: Fraction) -> NDArray[np.float64]:
    """Digits of a number with random carries, (NUM_DIGITS,), for `links.masks.quantised`."""
    if abs(number) >= MAX_EXACT:
        raise ValueError(f"a number is not smaller than {MAX_EXACT:.2g}")
    units = round(number * 2**_UNIT_BITS)
    digits = np.frombuffer(units.to_bytes(NUM_DIGITS, "little", signed=True), np.uint8)
    digits = digits.astype(np.int64)
    digits[-1] -= (units < 0) << _DIGIT_BITS
    drawn = np.frombuffer(secrets.token_bytes(4 * (NUM_DIGITS - 1)), np.uint32)
    carries = (drawn >> (32 - _CARRY_BITS)).astype(np.int64)
    digits[:-1] += carries << _DIGIT_BITS
    digits[1:] -= carries
    return digits.astype(np.float64) * 2.0**-FRACTION_BITS


def number_of(sums: NDArray[np.float64]) -> Fraction:
    """The sum of numbers from the sums of their digits, (NUM_DIGITS,)."""
    whole = np.rint(sums * 2.0**FRACTION_BITS).astype(np.int64).tolist()
    units = sum(digit << (_DIGIT_BITS * place) for place, digit in enumerate(whole))
    return Fraction(units, 2**_UNIT_BITS)
