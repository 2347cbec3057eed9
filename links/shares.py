"""Shamir's secret sharing (1979) of secrets of any length.

PyCryptodome shares 16 bytes; here a secret is padded (PKCS #7) and shared block by block. A share
is its number, from 1, in four bytes (little-endian), and its blocks, as in Flower's SecAgg+.
"""

from collections.abc import Sequence

from Crypto.Protocol.SecretSharing import Shamir
from Crypto.Util.Padding import pad, unpad

_BLOCK = 16
_NUMBER = 4


def create_shares(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Share a secret among `count` nodes; fewer than `threshold` shares tell only its length."""
    padded = pad(secret, _BLOCK)
    shares = [holder.to_bytes(_NUMBER, "little") for holder in range(1, count + 1)]
    for start in range(0, len(padded), _BLOCK):
        for holder, part in Shamir.split(
            threshold, count, padded[start : start + _BLOCK], ssss=False
        ):
            shares[holder - 1] += part
    return shares


def combine_shares(shares: Sequence[bytes]) -> bytes:
    """Open a secret with `threshold` of its shares.

    Raises ValueError if they are too few or not of one secret; 1 time in 255 that is not noticed.
    """
    padded = b""
    for start in range(_NUMBER, len(shares[0]), _BLOCK):
        parts = [
            (int.from_bytes(share[:_NUMBER], "little"), share[start : start + _BLOCK])
            for share in shares
        ]
        padded += Shamir.combine(parts, ssss=False)
    return unpad(padded, _BLOCK)
