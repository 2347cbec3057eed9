"""Registers node keys with a SuperLink over its Control API with TLS."""

from __future__ import annotations

import time
from pathlib import Path

import grpc
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, UnregisterNodeRequest
from flwr.supercore.constant import NodeStatus
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from fleet.superlink import Control


class RegistrationError(Exception):
    """The SuperLink does not answer, or refuses."""


class SecureControl(Control):
    """A connection to the Control API of a SuperLink with TLS."""

    def __init__(self, address: str, root_certificates: Path) -> None:
        super().__init__(address, root_certificates)
        self._address = address
        self._root_certificates = root_certificates

    def wait(self, timeout: float) -> None:
        """Wait until the SuperLink answers, at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not self.answers(timeout=1.0):
            if time.monotonic() > deadline:
                raise RegistrationError(
                    f"no SuperLink answers at superlink={self._address} within {timeout:.0f} s "
                    "(is it the Control API's address, 9093 by default, and is its certificate "
                    f"for that host and from {self._root_certificates}?)"
                )

    def register(self, public_key: str) -> tuple[int, bool]:
        """Register a node's key (OpenSSH); return Flower's node id and whether the key is new."""
        if (node_id := self.node_id(public_key)) is not None:
            return node_id, False
        try:
            request = RegisterNodeRequest(public_key=_flower_format(public_key))
            return self._stub.RegisterNode(request, timeout=10).node_id, True
        except grpc.RpcError as error:
            raise RegistrationError(
                f"the SuperLink refuses the key: {error.details()} (a key that was unregistered "
                "cannot be registered again: issue another)"
            ) from error

    def unregister(self, node_id: int) -> None:
        """Unregister a node: the SuperLink no longer admits its key."""
        self._stub.UnregisterNode(UnregisterNodeRequest(node_id=node_id), timeout=10)

    def node_id(self, public_key: str) -> int | None:
        """Return Flower's id of the node with this key, if it is registered."""
        key = _flower_format(public_key)
        for node in self._stub.ListNodes(ListNodesRequest(), timeout=10).nodes_info:
            if node.public_key == key and node.status != NodeStatus.UNREGISTERED:
                return int(node.node_id)
        return None


def _flower_format(public_key: str) -> bytes:
    return public_key_to_bytes(load_ssh_public_key(public_key.encode()))  # type: ignore[arg-type]
