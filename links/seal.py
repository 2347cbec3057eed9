"""End-to-end encryption between two nodes: nobody between them can read or change a parcel.

X25519 with both nodes' keys for the run, HKDF-SHA256, AES-256-GCM. Both keys make the shared
secret, so only the holder of the sender's key can have sealed a parcel that opens. Run, sender,
receiver, purpose, token and most bytes are authenticated and part of the key: a parcel opens
nowhere else.
"""

import json
import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from links.errors import LinkError
from links.records import Peered

OVERHEAD = 28
"""Bytes that a sealed payload has more than the payload."""

_FORMAT = "flwr-distill/seal/2"
_NONCE = 12


def seal(payload: bytes, waybill: Peered, run_id: int, key: X25519PrivateKey) -> bytes:
    """Encrypt a payload for the waybill's peer with the sender's key: nonce, ciphertext, tag."""
    nonce = os.urandom(_NONCE)
    context = _context(waybill, run_id)
    return nonce + _cipher(waybill, context, key).encrypt(nonce, payload, context)


def unseal(sealed: bytes, waybill: Peered, run_id: int, key: X25519PrivateKey) -> bytes:
    """Decrypt what :func:`seal` returned, with the receiver's key and the sender as peer.

    Raises `LinkError` if a bit of payload, waybill, run or keys differs.
    """
    context = _context(waybill, run_id)
    nonce, ciphertext = sealed[:_NONCE], sealed[_NONCE:]
    try:
        return _cipher(waybill, context, key).decrypt(nonce, ciphertext, context)
    except (InvalidTag, ValueError):
        raise LinkError(
            "it does not open: it was changed on its way, or sealed by or for another node, run "
            "or purpose"
        ) from None


def _context(waybill: Peered, run_id: int) -> bytes:
    return json.dumps([_FORMAT, str(run_id), waybill.to_bytes().decode()]).encode()


def _cipher(waybill: Peered, context: bytes, key: X25519PrivateKey) -> AESGCM:
    try:
        shared = key.exchange(X25519PublicKey.from_public_bytes(waybill.peer_key))
    except ValueError as error:
        raise LinkError(f"the other node's public key is unusable: {error}") from None
    return AESGCM(HKDF(SHA256(), 32, salt=None, info=context).derive(shared))
