"""How long a parcel may be on its way, and how much of a mailbox one peer may take."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flwr_distill.links.errors import LinkError
from flwr_distill.links.folder import parcels

HEADER_TIMEOUT = 5.0
"""Seconds in which a stream must send its header."""

MIN_RATE = 16 * 1024
"""Bytes a second below which a transfer is given up, on either side."""

STREAMS = 32
"""Streams at once into a mailbox; senders of more retry later."""

STREAMS_OF_A_CERTIFICATE = 4
"""Streams at once with one certificate."""

CAPACITY = 2**34
"""Bytes of all parcels in a mailbox together."""

CERTIFICATE_SHARE = 4
"""The parcels with one certificate take at most the capacity divided by this."""

_MIN_TIMEOUT = 30.0


def time_for(size: int) -> float:
    """Seconds that a parcel of this size may be on its way."""
    return _MIN_TIMEOUT + size / MIN_RATE


@contextmanager
def closed_after(seconds: float, close: Callable[[], object]) -> Iterator[None]:
    """Call `close`, from another thread, if the block takes longer."""
    timer = threading.Timer(seconds, close)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class BusyError(LinkError):
    """As many streams are open as are allowed: the sender retries later."""


@dataclass(frozen=True)
class Peer:
    """A sender: its certificate, or without TLS its address.

    Without TLS all peers are on this machine and share an address, which has no limit.
    """

    name: str
    certified: bool


class Admission:
    """Counts the streams into a node's mailboxes, and the bytes stored and on their way."""

    def __init__(self, state_dir: Path, capacity: int = CAPACITY) -> None:
        self._state_dir = state_dir
        self._capacity = capacity
        self._streams: Counter[Peer] = Counter()
        self._coming: dict[Path, tuple[Peer, int]] = {}
        self._senders: dict[Path, Peer] = {}
        self._lock = threading.Lock()

    @contextmanager
    def stream(self, peer: Peer) -> Iterator[None]:
        """Count a peer's stream while it is open; `BusyError` if it has too many."""
        limit = STREAMS_OF_A_CERTIFICATE if peer.certified else STREAMS
        with self._lock:
            if self._streams[peer] >= limit:
                raise BusyError(f"{limit} streams are open from here", remedy="retry later")
            self._streams[peer] += 1
        try:
            yield
        finally:
            with self._lock:
                self._streams[peer] -= 1
                self._streams += Counter()  # drops those at 0

    @contextmanager
    def space(self, peer: Peer, size: int, target: Path) -> Iterator[None]:
        """Reserve `size` bytes for a parcel at `target`.

        Raises `LinkError` if the mailbox, or the peer's part of it, would exceed its limit, or the
        same parcel is on its way already.
        """
        with self._lock:
            self._check_space(peer, size, target)
            self._coming[target] = peer, size
        try:
            yield
        finally:
            with self._lock:
                del self._coming[target]
                self._senders[target] = peer

    def _check_space(self, peer: Peer, size: int, target: Path) -> None:
        if target in self._coming:
            raise LinkError("it is on its way already")
        lying = dict(parcels(self._state_dir))
        self._senders = {path: sender for path, sender in self._senders.items() if path in lying}
        total = sum(lying.values()) + sum(size for _, size in self._coming.values())
        own = sum(lying[path] for path, sender in self._senders.items() if sender == peer)
        own += sum(size for sender, size in self._coming.values() if sender == peer)
        part = self._capacity // CERTIFICATE_SHARE if peer.certified else self._capacity
        for stored, limit in ((own, part), (total, self._capacity)):
            if stored + size > limit:
                problem = f"of {limit} allowed are stored"
                raise LinkError(problem, where="bytes in the mailbox", value=stored)
