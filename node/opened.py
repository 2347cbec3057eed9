"""Opens parcels that an app sends or receives: the guard judges what is in them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from flwr_distill.links.credentials import Credentials
from flwr_distill.links.errors import LinkError
from flwr_distill.links.folder import LinkFolder
from flwr_distill.links.records import Delivery, Parcel, Peered, Route
from flwr_distill.links.seal import unseal
from flwr_distill.node.asked import Asked, Form
from flwr_distill.node.replies import model_of_parcel, parcels_of, route_of
from flwr_distill.protocol.messages import DELIVERY
from flwr_distill.storage.store import NodeStore
from flwr_distill.task.errors import SettingsError


class Opener:
    """Opens the parcels of one run at a node.

    The node's key and the receiver's make a seal's key, so the sender can open it too.
    """

    def __init__(
        self, state_dir: Path, node_config: Mapping[str, Any], run_id: int, node_id: int
    ) -> None:
        self._node_config = node_config
        self._run_id = run_id
        self._key = LinkFolder(NodeStore.open(state_dir, run_id, node_id)).private_key

    def parcels(self, asked: Asked, content: RecordDict) -> dict[str, bytes]:
        """Payloads of the parcels that a reply relays, by record."""
        opened = {}
        credentials = Credentials.of(self._node_config)
        for name in parcels_of(content):
            try:
                route = Route.checked(route_of(asked, name), "route")
                if credentials is not None:
                    credentials.check_peer(route, self._run_id, route.receiver)
                parcel = Parcel.checked(content.config_records[name], name)
                route.check_size(len(parcel.payload))
                opened[name] = self._unsealed(route, parcel.payload)
            except (LinkError, SettingsError):
                continue
        return opened

    def delivered_model(self, content: RecordDict) -> dict[str, Form]:
        """The form of the model that another node has sent, if a message brings one."""
        record = content.config_records.get(DELIVERY, ConfigRecord())
        try:
            delivery = Delivery.checked(record, DELIVERY)
            return model_of_parcel(self._unsealed(delivery, delivery.payload))
        except (LinkError, SettingsError):
            return {}

    def _unsealed(self, waybill: Peered, sealed: bytes) -> bytes:
        return unseal(sealed, waybill, self._run_id, self._key())
