"""What a node keeps on disk for the links of one run: key, permit key, mailbox, spent tokens."""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from links.errors import LinkError
from links.store import NodeStore

LARGEST_PARCEL = 2**30
"""Bytes of a sealed payload, whichever way it goes."""

_SPENT = "its token is spent: a parcel came with it before"


class LinkFolder:
    """Folder of one node's links in one run, shared by its handlers and its mailbox.

    Parameters
    ----------
    store : NodeStore
        The node's, of the run.
    """

    def __init__(self, store: NodeStore) -> None:
        self._files = NodeStore(store.folder / "links")
        self._mailbox = self._files.folder / "mailbox"
        self._spent = self._files.folder / "spent"

    def private_key(self) -> X25519PrivateKey:
        """The node's key of the run, made when it is first asked for."""
        return X25519PrivateKey.from_private_bytes(self._secret("key"))

    def permit_key(self) -> bytes:
        """Key of the permits of the node's mailbox, made when it is first asked for."""
        return self._secret("permit-key")

    def known_permit_key(self) -> bytes:
        """Key of permits, if the node has taken part in the run.

        Raises
        ------
        LinkError
            If it has not.
        """
        try:
            return (self._files.folder / "permit-key").read_bytes()
        except FileNotFoundError:
            raise LinkError("this node has no mailbox for that run and receiver") from None

    def put(self, token: str, chunks: Iterable[bytes], size: int, sha256: str) -> None:
        """Write a parcel into the mailbox: whole, or not at all.

        Parameters
        ----------
        token : str
            Its token, which must not have brought another parcel.
        chunks : Iterable[bytes]
            The sealed payload.
        size : int
            Bytes that the sender announced.
        sha256 : str
            Checksum that the sender announced.

        Raises
        ------
        LinkError
            If the token is spent, or what came is not what was announced.
        """
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
                raise LinkError(f"it is not of the {size} bytes that were announced")
            if checksum.hexdigest() != sha256:
                raise LinkError("its checksum differs from the one that was announced")
            try:
                os.link(file.name, self._mailbox / token)
            except FileExistsError:
                raise LinkError(_SPENT) from None

    def take(self, token: str) -> bytes:
        """Take a parcel out of the mailbox.

        Raises
        ------
        LinkError
            If there is none.
        """
        path = self._mailbox / token
        try:
            sealed = path.read_bytes()
        except FileNotFoundError:
            raise LinkError("it is not in the mailbox: it never came, or has expired") from None
        path.unlink()
        return sealed

    def check_unspent(self, token: str) -> None:
        """Refuse a token that has brought a parcel.

        Raises
        ------
        LinkError
            If it has.
        """
        if (self._spent / token).exists():
            raise LinkError(_SPENT)

    def spend(self, token: str) -> None:
        """Note that a token has brought its parcel.

        Raises
        ------
        LinkError
            If it had before.
        """
        self._spent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            (self._spent / token).touch(mode=0o600, exist_ok=False)
        except FileExistsError:
            raise LinkError(_SPENT) from None

    def _secret(self, name: str) -> bytes:
        """32 random bytes, the same ever after; readable by this user only."""
        path = self._files.folder / name
        if not path.exists():
            self._files.write(name, secrets.token_bytes(32))
        return path.read_bytes()


def remove_expired(state_dir: Path, expiry: float) -> None:
    """Remove parcels, whole or begun, that have lain in any of a node's mailboxes for too long.

    Parameters
    ----------
    state_dir : Path
        The node's state directory.
    expiry : float
        Seconds.
    """
    oldest = time.time() - expiry
    for path in state_dir.glob("runs/*/*/links/mailbox/*"):
        try:
            if path.stat().st_mtime < oldest:
                path.unlink()
        except FileNotFoundError:  # taken meanwhile
            continue
