"""Which node keys a SuperLink admits, asked and told over its Control API with TLS."""

from __future__ import annotations

import time
from pathlib import Path

import grpc
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    RegisterNodeRequest,
    UnregisterNodeRequest,
)
from flwr.supercore.constant import NodeStatus
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from fleet.superlink import Control


class RegistrationError(Exception):
    """The SuperLink does not answer, or refuses; the text says why, in one line."""


class SecureControl(Control):
    """A connection to the Control API of a SuperLink with TLS.

    Parameters
    ----------
    address : str
        ``host:port`` of the Control API.
    root_certificates : Path
        PEM file of the authority that signed the SuperLink's certificate.
    """

    def __init__(self, address: str, root_certificates: Path) -> None:
        super().__init__(address, root_certificates)
        self._address = address
        self._root_certificates = root_certificates

    def wait(self, timeout: float) -> None:
        """Return once the SuperLink answers.

        Raises
        ------
        RegistrationError
            If it does not within so many seconds.
        """
        deadline = time.monotonic() + timeout
        while not self.answers(timeout=1.0):
            if time.monotonic() > deadline:
                raise RegistrationError(
                    f"no SuperLink answers at superlink={self._address} within {timeout:.0f} s "
                    "(is it the Control API's address, 9093 by default, and is its certificate "
                    f"for that host and from {self._root_certificates}?)"
                )

    def register(self, public_key: str) -> tuple[int, bool]:
        """Have a node's key admitted.

        Parameters
        ----------
        public_key : str
            In OpenSSH's format.

        Returns
        -------
        tuple[int, bool]
            Flower's node id, and whether the key is new to the SuperLink.

        Raises
        ------
        RegistrationError
            If the SuperLink refuses the key: one that was unregistered once never comes back.
        """
        if (node_id := self.node_id(public_key)) is not None:
            return node_id, False
        try:
            request = RegisterNodeRequest(public_key=_as_flower_keeps_it(public_key))
            return self._stub.RegisterNode(request, timeout=10).node_id, True
        except grpc.RpcError as error:
            raise RegistrationError(
                f"the SuperLink refuses the key: {error.details()} (a key that was unregistered "
                "once never comes back: issue another)"
            ) from error

    def unregister(self, node_id: int) -> None:
        """Have a node's key admitted no longer."""
        self._stub.UnregisterNode(UnregisterNodeRequest(node_id=node_id), timeout=10)

    def node_id(self, public_key: str) -> int | None:
        """Return Flower's id of the node with this key, if the SuperLink admits it."""
        key = _as_flower_keeps_it(public_key)
        for node in self._stub.ListNodes(ListNodesRequest(), timeout=10).nodes_info:
            if node.public_key == key and node.status != NodeStatus.UNREGISTERED:
                return int(node.node_id)
        return None


def _as_flower_keeps_it(public_key: str) -> bytes:
    return public_key_to_bytes(load_ssh_public_key(public_key.encode()))  # type: ignore[arg-type]
