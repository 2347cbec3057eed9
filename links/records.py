"""Records by which one node sends to another: introduction, route, parcel, delivery.

A node introduces itself to the server; the server gives a sender a route; the sender replies with a
parcel; and the server hands the receiver a delivery, made of both. Node ids are decimal texts, for
they fill 64 bits and a config record holds signed integers.
"""

import hashlib
import hmac
import json
from typing import Annotated, Literal

from pydantic import Field

from task.settings import Block

VIRTUAL_DATA = "virtual-data"
"""Purpose of a parcel: a member's distilled data for its cluster head (HFLDD, step 4)."""

LinkMode = Literal["relay", "direct", "auto"]
"""How parcels travel: through the server, from node to node, or directly where that works."""

NodeId = Annotated[str, Field(pattern=r"^[0-9]{1,20}$")]
Token = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
PublicKey = Annotated[bytes, Field(min_length=32, max_length=32)]


class Waybill(Block):
    """Who sends whom what for.

    Parameters
    ----------
    sender : str
        Node id of the sender.
    receiver : str
        Node id of the receiver.
    purpose : str
        What the parcel is for.
    token : str
        Good for one parcel.
    """

    sender: NodeId
    receiver: NodeId
    purpose: Annotated[str, Field(min_length=1, max_length=64)]
    token: Token

    def to_bytes(self) -> bytes:
        """Unambiguous bytes of the four fields."""
        return json.dumps([self.sender, self.receiver, self.purpose, self.token]).encode()

    def permit_from(self, permit_key: bytes) -> str:
        """HMAC-SHA256 by which the receiver's mailbox knows that the server allows this parcel.

        Parameters
        ----------
        permit_key : bytes
            The receiver's for this run, from its introduction.
        """
        return hmac.digest(permit_key, self.to_bytes(), hashlib.sha256).hex()


class Introduction(Block):
    """What others need in order to send to a node in this run.

    Parameters
    ----------
    public_key : bytes
        X25519 key of the node for this run.
    certificate : bytes (default: b"")
        PEM certificate of the node, where it has one.
    signature : bytes (default: b"")
        The certificate's signature under run, node and key.
    address : str (default: "")
        ``host:port`` of the node's mailbox, where it has one.
    permit_key : bytes (default: b"")
        Key of the permits that the mailbox asks for.
    """

    public_key: PublicKey
    certificate: bytes = b""
    signature: bytes = b""
    address: str = ""
    permit_key: bytes = b""


class Peered(Waybill):
    """A waybill with the public key of the other end, and what proves it.

    Parameters
    ----------
    peer_key : bytes
        ``public_key`` of the other end's introduction.
    peer_certificate, peer_signature : bytes (default: b"")
        ``certificate`` and ``signature`` there.
    """

    peer_key: PublicKey
    peer_certificate: bytes = b""
    peer_signature: bytes = b""


class Route(Peered):
    """What a sender needs for one parcel; the peer is the receiver.

    Parameters
    ----------
    link : str
        ``relay``, ``direct`` or ``auto``.
    address : str (default: "")
        The receiver's mailbox, where it has one.
    permit : str (default: "")
        The mailbox's permit for this parcel.
    """

    link: LinkMode
    address: str = ""
    permit: str = ""


class Parcel(Block):
    """What a sender replies: the sealed payload, or the receipt of a direct transfer.

    Parameters
    ----------
    link : str
        ``relay`` or ``direct``: the way that the parcel took.
    token : str
        As in the route.
    num_bytes : int
        Size of the sealed payload.
    payload : bytes (default: b"")
        The sealed payload, if relayed.
    """

    link: Literal["relay", "direct"]
    token: Token
    num_bytes: Annotated[int, Field(ge=0)]
    payload: bytes = b""


class Delivery(Peered):
    """What a receiver needs to open one parcel; the peer is the sender.

    Parameters
    ----------
    link : str
        ``relay`` or ``direct``: whether the parcel is in the payload or in the mailbox.
    payload : bytes (default: b"")
        The sealed payload, if relayed.
    """

    link: Literal["relay", "direct"]
    payload: bytes = b""
