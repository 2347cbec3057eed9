"""Sums under masks: maths of Bonawitz et al. 2017, sections 4 and 6.2, on arrays and bytes.

Each node adds to its numbers, integers modulo 2^64, one mask for each other node, which cancels in
the sum, and one that the sum's reader subtracts. All nodes have shares of both kinds of keys. The
masks are the key stream of AES-256 in counter mode: Flower's own generator of masks
(`flwr.common.secure_aggregation.secaggplus_utils`) has a state of 32 bits, which can be searched.
"""

import hashlib
import math
from collections.abc import Iterable

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from numpy.typing import NDArray

from flwr_distill.links.shares import combine_shares

Masked = NDArray[np.uint64]

FRACTION_BITS = 20
MAX_VALUE = 2.0**16
"""Largest size of a number in a sum."""
MAX_WEIGHT = 2**26
"""Largest sum of weights: weighted sums stay below 2^62."""
MIN_NODES = 3
"""Nodes in a sum: of two, each would know the other's part."""
MAX_NODES = 100
"""Nodes in a sum: to put the shares together takes time with the cube of their number."""


def threshold(num_nodes: int) -> int:
    """Shares that open a secret, and nodes that a sum needs: two thirds, rounded up.

    Each node gives one kind of share away. Two groups of so many nodes overlap by a third, so both
    secrets of a node are never opened, unless a third of the nodes break the rule.
    """
    return max(MIN_NODES, math.ceil(2 * num_nodes / 3))


def quantised(values: NDArray[np.float64], weight: int) -> Masked:
    """Weighted numbers as integers modulo 2^64, in units of 2^-20.

    All weights of a sum, each from 1, add up to 2^26 at most. Raises ValueError if a value is
    larger than 65,536 or not finite.
    """
    if not (np.abs(values) <= MAX_VALUE).all():  # NaN too
        raise ValueError(f"a number is not finite, or larger than {MAX_VALUE:,.0f}")
    return np.rint(values * (weight * 2.0**FRACTION_BITS)).astype(np.int64).view(np.uint64)


def dequantised(total: Masked) -> NDArray[np.float64]:
    """The numbers of a sum of :func:`quantised`."""
    return total.view(np.int64) * np.float64(2.0**-FRACTION_BITS)


def stream(seed: bytes, size: int) -> Masked:
    """A mask of 64-bit integers from a secret of 32 bytes, which serves for nothing else."""
    encryptor = Cipher(AES256(seed), CTR(bytes(16))).encryptor()
    return np.frombuffer(encryptor.update(bytes(8 * size)), "<u8")


def pair_mask(
    own: int, other: int, key: X25519PrivateKey, other_key: bytes, context: bytes, size: int
) -> Masked:
    """What node `own` adds so that it cancels what node `other` adds; both are places in the sum.

    The own key is for this sum alone. Unless both nodes have the same `context`, masks do not
    cancel. Raises ValueError if the other's key is unusable.
    """
    shared = key.exchange(X25519PublicKey.from_public_bytes(other_key))
    places = f" {min(own, other)} {max(own, other)}".encode()
    mask = stream(HKDF(SHA256(), 32, salt=None, info=context + places).derive(shared), size)
    return mask if own < other else np.negative(mask)


def public_bytes(key: X25519PrivateKey) -> bytes:
    """The public key of a private one, 32 bytes."""
    return key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def digest(secret: bytes) -> bytes:
    """SHA-256, by which a random secret is recognised without being sent."""
    return hashlib.sha256(secret).digest()


def open_secret(shares: Iterable[bytes], num_needed: int) -> bytes:
    """Combine shares of a secret; those beyond `num_needed` are ignored. ValueError if too few."""
    enough = list(shares)[:num_needed]
    if len(enough) < num_needed:
        raise ValueError(f"{len(enough)} of the {num_needed} shares that are needed")
    return combine_shares(enough)
