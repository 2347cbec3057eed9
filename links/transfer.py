"""Sends parcels to other nodes and receives theirs, relayed or direct."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from logging import WARNING
from typing import Any, Protocol, TypeVar

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.app import ConfigRecord
from flwr.common import log

from flwr_distill.links.credentials import Credentials
from flwr_distill.links.direct import deliver
from flwr_distill.links.errors import LinkError
from flwr_distill.links.folder import LinkFolder
from flwr_distill.links.loopback import is_local
from flwr_distill.links.records import Delivery, Introduction, Parcel, Route
from flwr_distill.links.seal import seal, unseal
from flwr_distill.links.streams import time_for
from flwr_distill.storage.store import NodeStore
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.settings import (
    Block,
)

B = TypeVar("B", bound=Block)
_RENEWAL_DAYS = 7.0
_HOST_AND_PORT = re.compile(r"(\[[0-9A-Fa-f.:]+(%\w+)?\]|[A-Za-z0-9._-]+):[0-9]{1,5}", re.ASCII)


class Endpoint(Protocol):
    """A node in a run, as its links see it."""

    @property
    def store(self) -> NodeStore:
        """The node's files for the run."""

    @property
    def run_id(self) -> int:
        """Flower's run id."""

    @property
    def node_id(self) -> int:
        """Flower's node id."""

    @property
    def node_config(self) -> Mapping[str, object]:
        """The node's config from its start."""


def introduce(session: Endpoint) -> ConfigRecord:
    """Return a :class:`links.records.Introduction`, which others need to send to this node."""
    folder, run_id, node_id = LinkFolder(session.store), session.run_id, session.node_id
    public = folder.private_key().public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    address = str(session.node_config.get("peer-address", ""))
    signed: dict[str, bytes] = {}
    if credentials := Credentials.of(session.node_config):
        if (left := credentials.days_left()) < _RENEWAL_DAYS:
            log(
                WARNING,
                "This node's certificate ends in %.1f days: renew it (flwr-distill certs renew), "
                "and put the new node.crt in its place",
                left,
            )
        signed["certificate"] = credentials.certificate
        signed["signature"] = credentials.sign(public, run_id, node_id)
        if address:
            signed["address_signature"] = credentials.sign_address(address, run_id, node_id)
    permit_key = folder.permit_key() if address else b""
    own: dict[str, Any] = {"address": address, "permit_key": permit_key, **signed}
    return _record(Introduction(public_key=public, **own))


def send(
    session: Endpoint, route: ConfigRecord, payload: bytes, deadline: float | None = None
) -> ConfigRecord:
    """Send a payload to the route's receiver, sealed so that only that node can read it.

    Returns a :class:`links.records.Parcel` for the reply to the server. An unresponsive receiver is
    given up after :func:`links.streams.time_for` the payload, and after half of the time until
    `deadline` (of `time.monotonic`), the other half being for the relay.

    Raises
    ------
    LinkError
        If the route is malformed or another node's, the receiver's key is not certified (if this
        node has a certificate), the payload is too large, or a link that must be direct fails.
    """
    checked = _checked(Route, route, "route")
    if checked.sender != str(session.node_id):
        raise LinkError(
            f"is for node {checked.sender}, this is node {session.node_id}", where="route"
        )
    credentials = Credentials.of(session.node_config)
    if credentials is not None:
        credentials.check_peer(checked, session.run_id, checked.receiver)
    sealed = seal(payload, checked, session.run_id, LinkFolder(session.store).private_key())
    checked.check_size(len(sealed))
    token, num_bytes = checked.token, len(sealed)
    if checked.address and checked.link != "relay":
        timeout = time_for(len(sealed))
        if deadline is not None:
            timeout = min(timeout, (deadline - time.monotonic()) / 2)
        try:
            _check_address(session, checked, credentials)
            deliver(sealed, checked, session.run_id, credentials, timeout)
            return _record(Parcel(link="direct", token=token, num_bytes=num_bytes))
        except LinkError as error:
            if checked.link == "direct":
                raise
            log(WARNING, "No direct link to node %s, using the relay: %s", checked.receiver, error)
    return _record(Parcel(link="relay", token=token, num_bytes=num_bytes, payload=sealed))


def _check_address(session: Endpoint, route: Route, credentials: Credentials | None) -> None:
    """Raise `LinkError` unless this node may connect to a route's address.

    Otherwise a lying server could have it try services of its own machine and network: an address
    must be signed by the receiver, and may be of this machine only if this node's own is, too. gRPC
    also takes addresses with a scheme, which could be of this machine in other words.
    """
    if not _HOST_AND_PORT.fullmatch(route.address):
        raise LinkError("must be HOST:PORT", where="address", value=route.address)
    if is_local(route.address) and not is_local(str(session.node_config.get("peer-address", ""))):
        raise LinkError(
            "is an address of this machine or its link, and this node's peer-address is not",
            where="address",
            value=route.address,
        )
    if credentials is not None:
        credentials.check_address(route, session.run_id)


def receive(session: Endpoint, parcel: ConfigRecord, purpose: str) -> bytes:
    """Open a delivery from the server's message (:meth:`links.routes.Links.forward`), once.

    Raises
    ------
    LinkError
        If the parcel is malformed, changed, too large, missing, opened before, or sealed by or for
        another node, run or purpose.
    """
    delivery = _checked(Delivery, parcel, "delivery")
    sender = delivery.sender
    parcel_from = f"parcel from node {sender}"
    if delivery.receiver != str(session.node_id):
        raise LinkError(f"is for node {delivery.receiver}", where=parcel_from)
    if delivery.purpose != purpose:
        raise LinkError(f"is {delivery.purpose}, not {purpose}", where=parcel_from)
    credentials = Credentials.of(session.node_config)
    if credentials is not None:
        credentials.check_peer(delivery, session.run_id, sender)
    folder = LinkFolder(session.store)
    try:
        delivery.check_size(len(delivery.payload))
        folder.check_unspent(delivery.token)
        sealed = delivery.payload if delivery.link == "relay" else folder.take(delivery.token)
        payload = unseal(sealed, delivery, session.run_id, folder.private_key())
        folder.spend(delivery.token)
    except LinkError as error:
        raise LinkError(str(error), where=parcel_from) from None
    return payload


def _checked(kind: type[B], record: ConfigRecord, source: str) -> B:
    try:
        return kind.checked(record, source)
    except SettingsError as error:
        raise LinkError(str(error)) from None


def _record(block: Introduction | Parcel) -> ConfigRecord:
    return ConfigRecord(block.model_dump(by_alias=True))
