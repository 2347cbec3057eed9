"""Registers node keys with a SuperLink over its Control API with TLS."""

from __future__ import annotations

from functools import cached_property

import grpc
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, UnregisterNodeRequest
from flwr.supercore.constant import NodeStatus
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from flwr_distill.flower.line_1_32.fleet.superlink import Control, SuperLinkError


class SecureControl(Control):
    """A connection to the Control API of a SuperLink with TLS, to register nodes."""

    def register(self, public_key: str) -> tuple[int, bool]:
        """Register a node's key (OpenSSH); return Flower's node id and whether the key is new."""
        if (node_id := self.node_id(public_key)) is not None:
            return node_id, False
        try:
            key = _flower_format(public_key)
            node_id = self._stub.RegisterNode(
                RegisterNodeRequest(public_key=key), timeout=10
            ).node_id
        except grpc.RpcError as error:
            raise SuperLinkError(
                f"the SuperLink refuses the key: {error.details()}",
                remedy="a key that was unregistered cannot be registered again: issue another",
            ) from error
        self._node_ids[key] = node_id
        return node_id, True

    def unregister(self, node_id: int) -> None:
        """Unregister a node: the SuperLink no longer admits its key."""
        self._stub.UnregisterNode(UnregisterNodeRequest(node_id=node_id), timeout=10)
        self._node_ids = {key: each for key, each in self._node_ids.items() if each != node_id}

    def node_id(self, public_key: str) -> int | None:
        """Return Flower's id of the node with this key, if it is registered."""
        return self._node_ids.get(_flower_format(public_key))

    @cached_property
    def _node_ids(self) -> dict[bytes, int]:
        """Flower's ids by key; cached, since the list of a large fleet is long."""
        return {
            node.public_key: node.node_id
            for node in self._stub.ListNodes(ListNodesRequest(), timeout=10).nodes_info
            if node.status != NodeStatus.UNREGISTERED
        }


def _flower_format(public_key: str) -> bytes:
    return public_key_to_bytes(load_ssh_public_key(public_key.encode()))  # type: ignore[arg-type]
