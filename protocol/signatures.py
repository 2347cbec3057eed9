"""Signatures of replies, for a SuperLink that does not compare who sends a reply.

They travel in the group of a reply's header: SuperLinks pass it on, and Flower's grid ignores it.
What is signed names the reply by its id, the hash of its metadata and of all its content.
"""

from __future__ import annotations

import base64
import json
from typing import Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

_FORMAT = "flwr-distill/reply/1"
_MARK = "~"
"""Between a group and a signature, which is in URL-safe base64."""


class Header(Protocol):
    """Flower's metadata of a message, as it goes over the network."""

    run_id: int
    src_node_id: int
    reply_to_message_id: str
    message_id: str
    group_id: str


def sign(header: Header, key: ec.EllipticCurvePrivateKey) -> None:
    """Sign a reply with its node's key."""
    signature = key.sign(_statement(header), ec.ECDSA(SHA256()))
    header.group_id += _MARK + base64.urlsafe_b64encode(signature).decode()


def is_signed(header: Header, key: ec.EllipticCurvePublicKey) -> bool:
    """Whether a reply is signed with the key of the node that it names."""
    _, _, signature = header.group_id.rpartition(_MARK)
    try:
        key.verify(base64.urlsafe_b64decode(signature), _statement(header), ec.ECDSA(SHA256()))
    except (ValueError, InvalidSignature):
        return False
    return True


def _statement(header: Header) -> bytes:
    node, run = str(header.src_node_id), str(header.run_id)
    return json.dumps([_FORMAT, run, node, header.reply_to_message_id, header.message_id]).encode()
