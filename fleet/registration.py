"""Registers node keys with a SuperLink over its Control API with TLS."""

from __future__ import annotations

import grpc
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, UnregisterNodeRequest
from flwr.supercore.constant import NodeStatus
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from fleet.superlink import Control, SuperLinkError


class SecureControl(Control):
    """A connection to the Control API of a SuperLink with TLS, to register nodes."""

    def register(self, public_key: str) -> tuple[int, bool]:
        """Register a node's key (OpenSSH); return Flower's node id and whether the key is new."""
        if (node_id := self.node_id(public_key)) is not None:
            return node_id, False
        try:
            request = RegisterNodeRequest(public_key=_flower_format(public_key))
            return self._stub.RegisterNode(request, timeout=10).node_id, True
        except grpc.RpcError as error:
            raise SuperLinkError(
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
