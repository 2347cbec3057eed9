"""A node's files for the links of one run: keys, mailbox, spent tokens, received models."""

from __future__ import annotations

import hashlib
import os
import random
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from logging import WARNING
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.common import log

from flwr_distill.links.errors import LinkError
from flwr_distill.storage import untrusted
from flwr_distill.storage.store import RUNS, NodeStore

_SECRET_BYTES = 32
_LINKS, _MAILBOX = "links", "mailbox"
_ID = re.compile(r"[0-9]{1,20}")
_SPENT = "its token is spent: a parcel with it came before"


class LinkFolder:
    """Folder of one node's links in one run, shared by its handlers and its mailbox."""

    def __init__(self, store: NodeStore) -> None:
        self._files = store.below(_LINKS)
        self._mailbox = self._files.folder / _MAILBOX
        self._spent = self._files.folder / "spent"
        self.models = self._files.below("models")
        """Store of the models that the node got, to which the server codes differences."""

    def private_key(self) -> X25519PrivateKey:
        """The node's key for the run, created on first use."""
        return X25519PrivateKey.from_private_bytes(self._secret("key"))

    def permit_key(self) -> bytes:
        """Key of the permits for the node's mailbox, created on first use."""
        return self._secret("permit-key")

    def existing_permit_key(self) -> bytes:
        """Key of the permits; `LinkError` if the node has not taken part in the run."""
        key = self._files.read("permit-key", _SECRET_BYTES) or b""
        if len(key) != _SECRET_BYTES:  # an empty key would let anyone make permits
            raise LinkError("this node has no mailbox for that run and receiver")
        return key

    def parcel(self, token: str) -> Path:
        """File of a parcel in the mailbox."""
        return self._mailbox / token

    def put(self, token: str, chunks: Iterable[bytes], size: int, sha256: str) -> None:
        """Write a parcel into the mailbox if its token is unspent and size and checksum match."""
        self.check_unspent(token)
        checksum, received = hashlib.sha256(), 0
        with (
            untrusted.folder(self._mailbox, create=True) as mailbox,
            untrusted.new_file(mailbox, token) as (number, partial),
        ):
            with os.fdopen(os.dup(number), "wb") as file:
                for chunk in chunks:
                    received += len(chunk)
                    if received > size:
                        break
                    checksum.update(chunk)
                    file.write(chunk)
            if received != size:
                raise LinkError(f"it does not have the announced {size} bytes")
            if checksum.hexdigest() != sha256:
                raise LinkError("its checksum differs from the announced one")
            try:
                os.link(partial, token, src_dir_fd=mailbox, dst_dir_fd=mailbox)
            except FileExistsError:
                raise LinkError(_SPENT) from None

    def take(self, token: str) -> bytes:
        """Remove a parcel from the mailbox and return it."""
        try:
            with untrusted.folder(self._mailbox) as mailbox:
                sealed = untrusted.read(mailbox, token)
                os.unlink(token, dir_fd=mailbox)
        except FileNotFoundError:
            raise LinkError("it is not in the mailbox: it never arrived, or expired") from None
        return sealed

    def check_unspent(self, token: str) -> None:
        """Raise `LinkError` if a parcel with this token was opened before."""
        with suppress(FileNotFoundError), untrusted.folder(self._spent) as spent:
            if untrusted.is_file(spent, token):
                raise LinkError(_SPENT)

    def spend(self, token: str) -> None:
        """Mark a token as spent, or raise `LinkError` if it is spent already."""
        with (
            untrusted.folder(self._spent, create=True) as spent,
            untrusted.new_file(spent, token) as (_, partial),
        ):
            try:
                os.link(partial, token, src_dir_fd=spent, dst_dir_fd=spent)
            except FileExistsError:
                raise LinkError(_SPENT) from None

    def _secret(self, name: str) -> bytes:
        """32 random bytes, created once; only this user can read them."""
        secret = self._files.read(name, _SECRET_BYTES)
        if secret is not None and len(secret) != _SECRET_BYTES:
            path = self._files.folder / name
            log(WARNING, "%s is damaged: a new one takes its place", path)
            secret = None
        if secret is None:
            secret = secrets.token_bytes(_SECRET_BYTES)
            self._files.write(name, secret)
        return secret


def parcels(state_dir: Path) -> Iterator[tuple[Path, int]]:
    """Files of the parcels in a node's mailboxes, and their bytes."""
    for run, node, links in _links_folders(state_dir):
        with suppress(OSError), untrusted.subfolder(links, _MAILBOX) as mailbox:
            folder = state_dir / RUNS / run / node / _LINKS / _MAILBOX
            for name in untrusted.names(mailbox):
                if not name.startswith("."):  # it is on its way
                    with suppress(OSError):  # the app may take it meanwhile
                        yield folder / name, untrusted.size_and_change(mailbox, name)[0]


def remove_expired(state_dir: Path, expiry: float) -> None:
    """Remove parcels, also incomplete ones, older than `expiry` seconds from a node's mailboxes."""
    oldest = time.time() - expiry
    for _, _, links in _links_folders(state_dir):
        with suppress(OSError), untrusted.subfolder(links, _MAILBOX) as mailbox:
            for name in untrusted.names(mailbox):
                with suppress(OSError):
                    if untrusted.size_and_change(mailbox, name)[1] < oldest:
                        os.unlink(name, dir_fd=mailbox)


def runs_with_links(state_dir: Path, most: int) -> list[int]:
    """Ids of runs that have files of links here: of more than `most`, as many at random."""
    runs = {int(run) for run, _, _ in _links_folders(state_dir)}
    return random.sample(sorted(runs), min(most, len(runs)))


def remove_links(state_dir: Path, run_id: int) -> None:
    """Remove a run's keys, spent tokens, uncollected parcels and received models."""
    with suppress(OSError), untrusted.folder(state_dir / RUNS / str(run_id)) as nodes:
        for name in untrusted.names(nodes):
            with suppress(OSError), untrusted.subfolder(nodes, name) as files:
                untrusted.remove(files, _LINKS)


def _links_folders(state_dir: Path) -> Iterator[tuple[str, str, int]]:
    """Run, node and descriptor of each folder of links; other names are not those of runs."""
    with suppress(OSError), untrusted.folder(state_dir / RUNS) as runs:
        for run in filter(_ID.fullmatch, untrusted.names(runs)):
            with suppress(OSError), untrusted.subfolder(runs, run) as nodes:
                for node in filter(_ID.fullmatch, untrusted.names(nodes)):
                    with (
                        suppress(OSError),
                        untrusted.subfolder(nodes, node) as files,
                        untrusted.subfolder(files, _LINKS) as links,
                    ):
                        yield run, node, links
