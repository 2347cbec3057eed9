"""A node's files for the links of one run: key, permit key, mailbox, spent tokens."""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from logging import WARNING
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.common import log

from links.errors import LinkError
from links.store import NodeStore

_SECRET_BYTES = 32
_SPENT = "its token is spent: a parcel with it came before"


class LinkFolder:
    """Folder of one node's links in one run, shared by its handlers and its mailbox."""

    def __init__(self, store: NodeStore) -> None:
        self._files = NodeStore(store.folder / "links")
        self._mailbox = self._files.folder / "mailbox"
        self._spent = self._files.folder / "spent"

    def private_key(self) -> X25519PrivateKey:
        """The node's key for the run, created on first use."""
        return X25519PrivateKey.from_private_bytes(self._secret("key"))

    def permit_key(self) -> bytes:
        """Key of the permits for the node's mailbox, created on first use."""
        return self._secret("permit-key")

    def existing_permit_key(self) -> bytes:
        """Key of the permits; `LinkError` if the node has not taken part in the run."""
        key = self._files.read("permit-key") or b""
        if len(key) != _SECRET_BYTES:  # an empty key would let anyone make permits
            raise LinkError("this node has no mailbox for that run and receiver")
        return key

    def parcel(self, token: str) -> Path:
        """File of a parcel in the mailbox."""
        return self._mailbox / token

    def put(self, token: str, chunks: Iterable[bytes], size: int, sha256: str) -> None:
        """Write a parcel into the mailbox if its token is unspent and size and checksum match."""
        self.check_unspent(token)
        self._mailbox.mkdir(parents=True, exist_ok=True, mode=0o700)
        checksum, received = hashlib.sha256(), 0
        with tempfile.NamedTemporaryFile(dir=self._mailbox, prefix=".") as file:
            for chunk in chunks:
                received += len(chunk)
                if received > size:
                    break
                checksum.update(chunk)
                file.write(chunk)
            file.flush()
            if received != size:
                raise LinkError(f"it does not have the announced {size} bytes")
            if checksum.hexdigest() != sha256:
                raise LinkError("its checksum differs from the announced one")
            try:
                os.link(file.name, self.parcel(token))
            except FileExistsError:
                raise LinkError(_SPENT) from None

    def take(self, token: str) -> bytes:
        """Remove a parcel from the mailbox and return it."""
        path = self.parcel(token)
        try:
            sealed = path.read_bytes()
        except FileNotFoundError:
            raise LinkError("it is not in the mailbox: it never arrived, or expired") from None
        path.unlink()
        return sealed

    def check_unspent(self, token: str) -> None:
        """Raise `LinkError` if a parcel with this token was opened before."""
        if (self._spent / token).exists():
            raise LinkError(_SPENT)

    def spend(self, token: str) -> None:
        """Mark a token as spent, or raise `LinkError` if it is spent already."""
        self._spent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            (self._spent / token).touch(mode=0o600, exist_ok=False)
        except FileExistsError:
            raise LinkError(_SPENT) from None

    def _secret(self, name: str) -> bytes:
        """32 random bytes, created once; only this user can read them."""
        secret = self._files.read(name)
        if secret is not None and len(secret) != _SECRET_BYTES:
            path = self._files.folder / name
            log(WARNING, "%s is damaged: a new one takes its place", path)
            secret = None
        if secret is None:
            secret = secrets.token_bytes(_SECRET_BYTES)
            self._files.write(name, secret)
        return secret


def remove_expired(state_dir: Path, expiry: float) -> None:
    """Remove parcels, also incomplete ones, older than `expiry` seconds from a node's mailboxes."""
    oldest = time.time() - expiry
    for path in state_dir.glob("runs/*/*/links/mailbox/*"):
        with suppress(FileNotFoundError):  # the app may take it meanwhile
            if path.stat().st_mtime < oldest:
                path.unlink()
