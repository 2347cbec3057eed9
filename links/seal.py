"""Sealing: what one node encrypts for another, so that nobody between them can read or change it.

X25519 between the two nodes' keys of the run, HKDF-SHA256, AES-256-GCM. Both ends' keys go into the
shared secret, so that what opens was sealed by the holder of the sender's key. Run, sender,
receiver, purpose and token are bound into the key and authenticated: a parcel opens nowhere else.
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

_FORMAT = "flwr-distill/seal/1"
_NONCE = 12


def seal(payload: bytes, waybill: Peered, run_id: int, key: X25519PrivateKey) -> bytes:
    """Encrypt a payload for the waybill's receiver.

    Parameters
    ----------
    payload : bytes
        What only the receiver may read.
    waybill : Peered
        With the receiver's public key.
    run_id : int
        Flower's run id.
    key : X25519PrivateKey
        The sender's.

    Returns
    -------
    bytes
        Nonce, ciphertext and tag.

    Raises
    ------
    LinkError
        If the receiver's public key is none.
    """
    nonce = os.urandom(_NONCE)
    context = _context(waybill, run_id)
    return nonce + _cipher(waybill, context, key).encrypt(nonce, payload, context)


def unseal(sealed: bytes, waybill: Peered, run_id: int, key: X25519PrivateKey) -> bytes:
    """Decrypt what :func:`seal` made.

    Parameters
    ----------
    sealed : bytes
        As received.
    waybill : Peered
        With the sender's public key; otherwise as it was sealed with.
    run_id : int
        Flower's run id.
    key : X25519PrivateKey
        The receiver's.

    Raises
    ------
    LinkError
        If anything differs from what was sealed, and for whom, by a bit.
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
