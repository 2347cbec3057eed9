"""The server's part in links between nodes: who can be sent to, and by which route."""

import secrets
from collections.abc import Mapping
from typing import Any

from flwr.app import ConfigRecord

from links.records import Delivery, Introduction, LinkMode, Parcel, Route, Waybill
from task.settings import SettingsError


class Links:
    """Routes from node to node.

    The sender gets a route in its message, the receiver what :meth:`forward` makes of the route and
    of the sender's parcel. A route is good for one parcel.

    Parameters
    ----------
    introductions : Mapping[int, Introduction]
        Of each node that can send and be sent to.
    mode : str (default: "auto")
        ``relay``: parcels ride in messages through the server, sealed. ``direct``: from node to
        node. ``auto``: directly where the receiver has an address and the transfer works.
    """

    def __init__(self, introductions: Mapping[int, Introduction], mode: LinkMode = "auto") -> None:
        self.mode = mode
        self._introductions = introductions

    def __contains__(self, node: int) -> bool:
        return node in self._introductions

    def route(self, sender: int, receiver: int, purpose: str) -> ConfigRecord:
        """Route for one parcel, to be put into the sender's message.

        Parameters
        ----------
        sender : int
            Node id.
        receiver : int
            Node id.
        purpose : str
            What the parcel is for; the receiver opens it for nothing else.

        Raises
        ------
        SettingsError
            If links must be direct and the receiver has no address.
        KeyError
            If the receiver did not introduce itself.
        """
        to = self._introductions[receiver]
        if self.mode == "direct" and not to.address:
            raise SettingsError(
                f'links = "direct", but node {receiver} has no address (start it with '
                '--peer-address HOST:PORT, or set links to "auto")'
            )
        waybill = Waybill(
            sender=str(sender), receiver=str(receiver), purpose=purpose, token=secrets.token_hex(16)
        )
        return _record(
            Route(
                **waybill.model_dump(),
                **_peer(to),
                link=self.mode,
                address=to.address,
                permit=waybill.permit_from(to.permit_key) if to.address else "",
            )
        )

    def forward(self, route: ConfigRecord, parcel: ConfigRecord) -> ConfigRecord:
        """Delivery for the receiver's message.

        Parameters
        ----------
        route : ConfigRecord
            As the sender got it.
        parcel : ConfigRecord
            As the sender replied.

        Raises
        ------
        SettingsError
            If the parcel is malformed.
        """
        given = Route.checked(route, "route")
        sent = Parcel.checked(parcel, f"parcel of node {given.sender}")
        return _record(
            Delivery(
                **given.model_dump(include=set(Waybill.model_fields)),
                **_peer(self._introductions[int(given.sender)]),
                link=sent.link,
                payload=sent.payload,
            )
        )


def _peer(told: Introduction) -> dict[str, Any]:
    return {
        "peer_key": told.public_key,
        "peer_certificate": told.certificate,
        "peer_signature": told.signature,
    }


def _record(block: Route | Delivery) -> ConfigRecord:
    return ConfigRecord(block.model_dump(by_alias=True))
