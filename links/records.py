"""Records with which one node sends to another: introduction, route, parcel, delivery.

The server sends the sender a route, the sender replies with a parcel, and from both the server
makes the delivery for the receiver. Node ids are strings: a ConfigRecord's integers are signed.
"""

import hashlib
import hmac
import json
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from flwr_distill.links.errors import LinkError
from flwr_distill.task.settings import Block

VIRTUAL_DATA = "virtual-data"
"""Purpose of a parcel: a member's distilled data for its cluster head (HFLDD, step 4)."""

MAX_PARCEL = 2**30
"""Bytes of a sealed payload that no route permits more than."""

LinkMode = Literal["relay", "direct", "auto"]
"""How parcels travel: through the server, directly, or directly where the receiver has an address
and the transfer works.
"""


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be printable, on one line")
    return text


def _without_id(name: str) -> str:
    if re.search(r"\d{15}", name):
        raise ValueError("must not have 15 digits in a row: it would resemble a node's id")
    return name


NodeId = Annotated[str, Field(pattern=r"^[0-9]{1,20}$")]
Token = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
PublicKey = Annotated[bytes, Field(min_length=32, max_length=32)]
Printable = Annotated[str, AfterValidator(_printable)]
NotAnId = Annotated[Printable, AfterValidator(_without_id)]
"""A name that logs cannot take for another node's id."""
NodeName = Annotated[NotAnId, Field(pattern=r"^\S(.*\S)?$", max_length=40)]
"""What people call a node (``flwr-distill node --name``)."""


class Waybill(Block):
    """Sender, receiver (node ids), purpose, one-time token and greatest size of a parcel.

    All of it is under the server's permit and under the seal, so that no node can raise `largest`.
    """

    sender: NodeId
    receiver: NodeId
    purpose: Annotated[str, Field(min_length=1, max_length=64)]
    token: Token
    largest: Annotated[int, Field(ge=1, le=MAX_PARCEL)] = MAX_PARCEL

    def to_bytes(self) -> bytes:
        """Unambiguous bytes of the five fields."""
        fields = [self.sender, self.receiver, self.purpose, self.token, self.largest]
        return json.dumps(fields).encode()

    def check_size(self, size: int) -> None:
        """Raise `LinkError` if a sealed payload of this size is too large."""
        if size > self.largest:
            raise LinkError(f"more than the {self.largest} allowed", where="bytes", value=size)

    def permit_from(self, permit_key: bytes) -> str:
        """HMAC-SHA256 that shows the receiver's mailbox that the server permits this parcel."""
        return hmac.digest(permit_key, self.to_bytes(), hashlib.sha256).hex()


class Introduction(Block):
    """What others need in order to send to a node in this run."""

    public_key: PublicKey
    """X25519 key of the node for this run."""
    certificate: Annotated[bytes, Field(max_length=2**16)] = b""
    """PEM certificate of the node, if it has one."""
    signature: Annotated[bytes, Field(max_length=1024)] = b""
    """Signature of run, node and public key with the certificate's key."""
    address: Annotated[Printable, Field(max_length=300)] = ""
    """``host:port`` of the node's mailbox, if it has one."""
    address_signature: Annotated[bytes, Field(max_length=1024)] = b""
    """Signature of run, node and address with the certificate's key."""
    permit_key: Annotated[bytes, Field(max_length=64)] = b""
    """Key of the permits for the mailbox."""


class Peered(Waybill):
    """A waybill with public key, certificate and signature from the peer's introduction.

    `peer_name` is who the peer is by its certificate; empty without one.
    """

    peer_key: PublicKey
    peer_name: Annotated[Printable, Field(max_length=64)] = ""
    peer_certificate: bytes = b""
    peer_signature: bytes = b""


class Route(Peered):
    """What a sender needs for one parcel; the peer is the receiver.

    `address`, `address_signature` and `permit` are of the receiver's mailbox; empty without one.
    """

    link: LinkMode
    address: str = ""
    address_signature: bytes = b""
    permit: str = ""


class Parcel(Block):
    """What a sender replies: the sealed payload, or the receipt of a direct transfer."""

    link: Literal["relay", "direct"]
    """``relay`` or ``direct``: how the parcel travelled."""
    token: Token
    """As in the route."""
    num_bytes: Annotated[int, Field(ge=0)]
    """Size of the sealed payload."""
    payload: bytes = b""
    """The sealed payload, if relayed."""


class Delivery(Peered):
    """What a receiver needs to open one parcel; the peer is the sender.

    The sealed payload is here if relayed, in the mailbox if sent directly.
    """

    link: Literal["relay", "direct"]
    payload: bytes = b""
