"""Parcels and virtual data in a reply: each is unsealed and decoded once, for all judges."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, RecordDict
from safetensors.numpy import save

from flwr_distill.links.credentials import Credentials
from flwr_distill.links.errors import LinkError
from flwr_distill.links.folder import LinkFolder
from flwr_distill.links.records import MAX_PARCEL, VIRTUAL_DATA, Delivery, Parcel, Route
from flwr_distill.links.seal import unseal
from flwr_distill.node.requests import Form, MessageRequest, forms_of
from flwr_distill.protocol.arrays import Arrays, as_arrays
from flwr_distill.protocol.coded import decoded
from flwr_distill.protocol.messages import DELIVERY, PARCEL
from flwr_distill.protocol.parcels import read_payload
from flwr_distill.storage.store import NodeStore
from flwr_distill.task.errors import SettingsError

if TYPE_CHECKING:
    from flwr_distill.distill.virtual_overview import Overview


class Payload:
    """What a parcel or a record for the server holds; each reading of it is cached."""

    def __init__(self, content: bytes, purpose: str, max_bytes: int = MAX_PARCEL) -> None:
        self.content = content
        self.purpose = purpose
        self._max_bytes = max_bytes

    @cached_property
    def digest(self) -> str:
        """SHA-256."""
        return hashlib.sha256(self.content).hexdigest()

    @cached_property
    def virtual_data(self) -> Overview:
        """What it says of itself as virtual data; VirtualDataError if it is something else."""
        from flwr_distill.distill.virtual_overview import Overview  # here: imports torch

        return Overview.of(self.content, self._max_bytes)

    @cached_property
    def model(self) -> Arrays:
        """Its arrays, decoded, as a model; ValueError if it is something else, or has more in it.

        Of a difference it is the difference.
        """
        record, codec = read_payload(self.content, self._max_bytes)
        arrays = as_arrays(decoded(record))
        if codec == "float32" and save(arrays) != self.content:
            raise ValueError("more than a model")
        return arrays


class Opener:
    """Opens the parcels of one run at a node: a seal's sender can open it too."""

    def __init__(
        self, state_dir: Path, node_config: Mapping[str, Any], run_id: int, node_id: int
    ) -> None:
        self._node_config = node_config
        self._run_id = run_id
        self._key = LinkFolder(NodeStore.open(state_dir, run_id, node_id)).private_key

    def payloads(self, request: MessageRequest, reply: RecordDict) -> dict[str, Payload]:
        """What a reply's relayed parcels hold that open, and virtual data for the server."""
        payloads = virtual_data_for_server(reply)
        credentials = Credentials.of(self._node_config)
        for name in parcels_of(reply):
            try:
                route = Route.checked(request.route_of(name), "route")
                if credentials is not None:
                    credentials.check_peer(route, self._run_id, route.receiver)
                sealed = Parcel.checked(reply.config_records[name], name).payload
                route.check_size(len(sealed))
                content = unseal(sealed, route, self._run_id, self._key())
            except (LinkError, SettingsError):
                continue
            payloads[name] = Payload(content, route.purpose, route.largest)
        return payloads

    def delivered_model(self, content: RecordDict) -> dict[str, Form]:
        """The forms of the model that another node has sent, if a message brings one."""
        record = content.config_records.get(DELIVERY, ConfigRecord())
        try:
            delivery = Delivery.checked(record, DELIVERY)
            payload = unseal(delivery.payload, delivery, self._run_id, self._key())
            return forms_of(read_payload(payload, delivery.largest)[0])
        except Exception:  # whatever the other node's bytes make the readers raise
            return {}


def parcels_of(reply: RecordDict) -> list[str]:
    """Names of the records with parcels for other nodes."""
    return [name for name in reply.config_records if name.partition(".")[0] == PARCEL]


def virtual_data_for_server(reply: RecordDict) -> dict[str, Payload]:
    """Virtual data that are for the server, and not sealed."""
    record = reply.config_records.get(VIRTUAL_DATA, ConfigRecord())
    return {
        f"{VIRTUAL_DATA} {key}": Payload(value, VIRTUAL_DATA)
        for key, value in record.items()
        if isinstance(value, bytes)
    }


def virtual_data_in(payloads: Mapping[str, Payload]) -> list[Payload]:
    """Virtual data among the payloads of a reply."""
    return [payload for payload in payloads.values() if payload.purpose == VIRTUAL_DATA]


def array_forms(arrays: Arrays) -> dict[str, Form]:
    """Shapes and types of arrays."""
    return {name: (array.shape, str(array.dtype)) for name, array in arrays.items()}
