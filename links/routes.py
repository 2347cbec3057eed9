"""The server's part in links between nodes: it makes routes and deliveries."""

import secrets
from collections.abc import Mapping
from typing import Any

from flwr.app import ConfigRecord

from flwr_distill.links.credentials import name_of
from flwr_distill.links.records import (
    MAX_PARCEL,
    Delivery,
    Introduction,
    LinkMode,
    Parcel,
    Route,
    Waybill,
)
from flwr_distill.links.seal import sealed_size
from flwr_distill.task.errors import SettingsError


class Links:
    """Routes from node to node, by nodes' introductions.

    The sender's message contains a route. The receiver's contains a delivery, which :meth:`forward`
    creates from the route and the sender's parcel. A route is for one parcel. See `LinkMode`.
    """

    def __init__(self, introductions: Mapping[int, Introduction], mode: LinkMode = "auto") -> None:
        self.mode = mode
        self._introductions = introductions

    def __contains__(self, node: int) -> bool:
        return node in self._introductions

    def route(
        self, sender: int, receiver: int, purpose: str, largest: int | None = None
    ) -> ConfigRecord:
        """Create a route for one parcel, for the sender's message.

        The receiver opens it for this `purpose` only, and with a payload of `largest` bytes at
        most. Raises `SettingsError` if links must be direct and the receiver has no address.
        """
        introduction = self._introductions[receiver]
        if self.mode == "direct" and not introduction.address:
            raise SettingsError(
                f"node {receiver} has no address",
                where="links",
                value="direct",
                remedy='start it with --peer-address HOST:PORT, or set links to "auto"',
            )
        waybill = Waybill(
            sender=str(sender),
            receiver=str(receiver),
            purpose=purpose,
            token=secrets.token_hex(16),
            largest=min(MAX_PARCEL, sealed_size(largest or MAX_PARCEL, purpose)),
        )
        return _record(
            Route(
                **waybill.model_dump(),
                **_peer(introduction),
                link=self.mode,
                address=introduction.address,
                address_signature=introduction.address_signature,
                permit=waybill.permit_from(introduction.permit_key) if introduction.address else "",
            )
        )

    def forward(self, route: ConfigRecord, parcel: ConfigRecord) -> ConfigRecord:
        """Create the delivery for the receiver's message, from the sender's route and parcel.

        Raises `SettingsError` if the parcel is malformed, `LinkError` if it exceeds its route's
        size.
        """
        waybill = Route.checked(route, "route")
        reply = Parcel.checked(parcel, f"parcel of node {waybill.sender}")
        waybill.check_size(len(reply.payload))
        return _record(
            Delivery(
                **waybill.model_dump(include=set(Waybill.model_fields)),
                **_peer(self._introductions[int(waybill.sender)]),
                link=reply.link,
                payload=reply.payload,
            )
        )


def _peer(introduction: Introduction) -> dict[str, Any]:
    return {
        "peer_key": introduction.public_key,
        "peer_name": name_of(introduction.certificate),
        "peer_certificate": introduction.certificate,
        "peer_signature": introduction.signature,
    }


def _record(block: Route | Delivery) -> ConfigRecord:
    return ConfigRecord(block.model_dump(by_alias=True))
