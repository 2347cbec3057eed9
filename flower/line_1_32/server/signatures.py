"""Whether a node has signed its reply, where the server knows the keys of registered nodes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from flwr_distill.protocol.signatures import is_signed
from flwr_distill.task.errors import ReportedError

KEYS_VARIABLE = "FLWR_DISTILL_NODE_KEYS"
"""Variable of a ServerApp that names the file of nodes' keys, of `flwr-distill register`."""


class NodeKeysError(ReportedError, RuntimeError):
    """The file of nodes' keys cannot be read."""


class NodeKeys:
    """Keys of registered nodes, from a file that is read again when it has changed.

    An unreadable file raises `NodeKeysError`: replies would count that nobody has checked.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._version = (0, 0)
        self._keys: dict[int, ec.EllipticCurvePublicKey] = {}
        self._read()

    @classmethod
    def from_environment(cls) -> NodeKeys | None:
        """Keys from the file that the environment names; None if it names none."""
        return cls(Path(file)) if (file := os.environ.get(KEYS_VARIABLE)) else None

    def accept(self, header: Any) -> bool:
        """Whether a reply's node has signed it, or is not in the file."""
        self._read()
        key = self._keys.get(header.src_node_id)
        return key is None or is_signed(header, key)

    def _read(self) -> None:
        try:
            about = self._file.stat()
            version = about.st_mtime_ns, about.st_ino
            if version == self._version:
                return
            texts = json.loads(self._file.read_text(encoding="utf-8"))
            self._keys = {int(node): _key(text) for node, text in texts.items()}
            self._version = version
        except (OSError, ValueError, AttributeError) as error:
            raise NodeKeysError(
                f"cannot be read: {error}",
                where=KEYS_VARIABLE,
                value=str(self._file),
                remedy="name the nodes.json that `flwr-distill register` writes, or unset the "
                "variable",
            ) from error


def _key(text: str) -> ec.EllipticCurvePublicKey:
    key = load_ssh_public_key(text.encode())
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("a key is not on an elliptic curve")
    return key
