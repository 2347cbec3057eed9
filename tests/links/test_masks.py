"""Masks cancel in a sum, and nothing but the sum is seen through them."""

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_distill.links.masks import (
    MAX_VALUE,
    MAX_WEIGHT,
    dequantised,
    open_secret,
    pair_mask,
    public_bytes,
    quantised,
    stream,
    threshold,
)
from flwr_distill.links.shares import create_shares

SEED = bytes(range(32))


@settings(max_examples=50)
@given(
    st.lists(st.integers(1, 10_000), min_size=1, max_size=12),
    st.floats(1e-6, 1e4),
    st.integers(0, 2**32 - 1),
)
def test_the_sum_of_quantised_numbers_is_the_weighted_sum(weights, size, seed):
    values = np.random.default_rng(seed).uniform(-size, size, (len(weights), 9))
    total = sum(quantised(row, weight) for row, weight in zip(values, weights, strict=True))
    mean = dequantised(total) / sum(weights)
    exact = np.average(values, axis=0, weights=weights)
    bound = len(weights) * 2.0**-21 / sum(weights) + 1e-12 * size
    assert np.abs(mean - exact).max() <= bound


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sum_does_not_wrap_around(sign):
    half = MAX_WEIGHT // 2
    total = 2 * quantised(np.full(3, sign * MAX_VALUE), half)
    assert (dequantised(total) == sign * MAX_VALUE * MAX_WEIGHT).all()


@pytest.mark.parametrize("odd", [np.nan, np.inf, MAX_VALUE * 1.01, -MAX_VALUE * 1.01])
def test_a_number_that_has_no_room_is_refused(odd):
    with pytest.raises(ValueError, match="not finite, or larger than 65,536"):
        quantised(np.array([0.0, odd]), 1)


def test_masks_of_two_nodes_cancel_if_they_saw_the_same_and_only_then():
    keys = [X25519PrivateKey.generate() for _ in range(2)]
    public = [public_bytes(key) for key in keys]
    first = pair_mask(0, 1, keys[0], public[1], b"seen", 100)
    assert not (first + pair_mask(1, 0, keys[1], public[0], b"seen", 100)).any()
    assert (first + pair_mask(1, 0, keys[1], public[0], b"other", 100)).all()
    assert (first + pair_mask(2, 0, keys[1], public[0], b"seen", 100)).all()


def test_a_mask_is_the_key_stream_of_aes_256_in_counter_mode():
    """AES-256 of block 0 under the key 00 01 .. 1f, from another implementation."""
    from Crypto.Cipher import AES

    block = AES.new(SEED, AES.MODE_ECB).encrypt(bytes(16))
    assert stream(SEED, 2).tobytes() == block


def test_the_threshold_leaves_no_room_for_two_groups():
    for num_nodes in range(3, 101):
        needed = threshold(num_nodes)
        assert 3 <= needed <= num_nodes
        assert 2 * needed - num_nodes >= num_nodes / 3


def test_a_secret_opens_with_enough_shares_and_with_no_fewer():
    shares = create_shares(SEED, 3, 5)
    assert open_secret(shares[2:], 3) == SEED
    with pytest.raises(ValueError, match="2 of the 3 shares"):
        open_secret(shares[:2], 3)
