"""Short messages between a node's processes: JSON with its length in front, of a bounded size.

One end may run an app: nothing is unpickled, read beyond a limit, or awaited beyond a timeout.
"""

from __future__ import annotations

import json
import select
import socket
import time
from typing import Any, Self

LIMIT = 1 << 16
"""Bytes of a note, as JSON."""
MAX_TEXT = 4_000
"""Characters of a text in a note: JSON makes at most twelve bytes of one."""

_LENGTH = 4
_SEND_TIMEOUT = 30.0


class NotesError(Exception):
    """What arrived is not a note."""


class Notes:
    """One end of a stream of notes, a socket."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """Make both ends of a stream."""
        here, there = socket.socketpair()
        return cls(here), cls(there)

    @classmethod
    def of(cls, number: int) -> Self:
        """The end with a file descriptor that this process inherited."""
        return cls(socket.socket(fileno=number))

    def fileno(self) -> int:
        """File descriptor."""
        return self._end.fileno()

    def close(self) -> None:
        """Close this end."""
        self._end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def send(self, *note: Any) -> None:
        """Send values of JSON; OSError if the other end is closed, or does not read for 30 s."""
        content = json.dumps(note).encode()
        self._end.settimeout(_SEND_TIMEOUT)
        self._end.sendall(len(content).to_bytes(_LENGTH, "big") + content)

    def is_waiting(self, timeout: float = 0.0) -> bool:
        """Whether something arrives within `timeout` seconds, if only the end of the stream."""
        return bool(select.select([self._end], [], [], timeout)[0])

    def receive(self, timeout: float | None = None) -> list[Any]:
        """Receive a note, all of it within `timeout` seconds.

        TimeoutError, EOFError if the other end is closed, or NotesError if it is too large or no
        list in JSON.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        length = int.from_bytes(self._exactly(_LENGTH, deadline), "big")
        if length > LIMIT:
            raise NotesError(f"a note of {length} bytes exceeds the limit {LIMIT}")
        content = self._exactly(length, deadline)
        try:
            note = json.loads(content)
        except (ValueError, RecursionError):
            raise NotesError("a note is not JSON") from None
        if not isinstance(note, list):
            raise NotesError("a note is not a list")
        return note

    def _exactly(self, size: int, deadline: float | None) -> bytes:
        content = bytearray()
        while len(content) < size:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                left = 0.0  # what has arrived already is in time
            self._end.settimeout(left)
            try:
                part = self._end.recv(size - len(content))
            except BlockingIOError:
                raise TimeoutError("no note in time") from None
            if not part:
                raise EOFError
            content += part
        return bytes(content)


def shortened(text: str) -> str:
    """A text that fits into a note, and that UTF-8 can encode."""
    return text[:MAX_TEXT].encode("utf-8", "replace").decode()
