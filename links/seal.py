"""End-to-end encryption between two nodes: nobody between them can read or change a parcel.

X25519 with both nodes' keys for the run, HKDF-SHA256, AES-256-GCM. Both keys make the shared
secret, so only the owner of the sender's key can have sealed a parcel that opens. Run, sender,
receiver, purpose, token and size bound are authenticated and part of the key.

Virtual data are padded inside the seal, because their size tells how many classes a node has: sizes
are 4, 5, 6 or 7 times a power of two. That of a model tells nothing.
"""

import json
import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from flwr_distill.links.errors import LinkError
from flwr_distill.links.records import VIRTUAL_DATA, Peered

_FORMAT = "flwr-distill/seal/3"
_NONCE = 12
_TAG = 16
_LEADING_BITS = 3
_END = b"\x80"
"""Follows the payload where it is padded, and is followed by zeros (ISO/IEC 7816-4)."""


def sealed_size(size: int, purpose: str) -> int:
    """Bytes of a sealed payload of `size` bytes."""
    return _NONCE + _padded_size(size, purpose) + _TAG


def seal(payload: bytes, waybill: Peered, run_id: int, key: X25519PrivateKey) -> bytes:
    """Pad and encrypt a payload for the waybill's peer with the sender's key.

    Returns nonce, ciphertext and tag, `sealed_size` bytes.
    """
    nonce = os.urandom(_NONCE)
    context = _context(waybill, run_id)
    content = _padded(payload, waybill.purpose)
    return nonce + _cipher(waybill, context, key).encrypt(nonce, content, context)


def unseal(sealed: bytes, waybill: Peered, run_id: int, key: X25519PrivateKey) -> bytes:
    """Decrypt what :func:`seal` returned, with the receiver's key and the sender as peer.

    Raises `LinkError` if a bit of payload, waybill, run, keys or padding differs.
    """
    context = _context(waybill, run_id)
    nonce, ciphertext = sealed[:_NONCE], sealed[_NONCE:]
    try:
        content = _cipher(waybill, context, key).decrypt(nonce, ciphertext, context)
    except (InvalidTag, ValueError):
        raise LinkError(
            "it does not open: it was changed on its way, or sealed by or for another node, run "
            "or purpose"
        ) from None
    return _unpadded(content, waybill.purpose)


def _padded_size(size: int, purpose: str) -> int:
    if purpose != VIRTUAL_DATA:
        return size
    least = size + len(_END)
    step = 1 << max(0, least.bit_length() - _LEADING_BITS)
    return -(-least // step) * step


def _padded(payload: bytes, purpose: str) -> bytes:
    if purpose != VIRTUAL_DATA:
        return payload
    return (payload + _END).ljust(_padded_size(len(payload), purpose), b"\0")


def _unpadded(content: bytes, purpose: str) -> bytes:
    if purpose != VIRTUAL_DATA:
        return content
    payload = content.rstrip(b"\0").removesuffix(_END)
    if _padded(payload, purpose) != content:
        raise LinkError("it opens, but its padding is invalid")
    return payload


def _context(waybill: Peered, run_id: int) -> bytes:
    return json.dumps([_FORMAT, str(run_id), waybill.to_bytes().decode()]).encode()


def _cipher(waybill: Peered, context: bytes, key: X25519PrivateKey) -> AESGCM:
    try:
        shared = key.exchange(X25519PublicKey.from_public_bytes(waybill.peer_key))
    except ValueError as error:
        raise LinkError(f"the other node's public key is unusable: {error}") from None
    return AESGCM(HKDF(SHA256(), 32, salt=None, info=context).derive(shared))
