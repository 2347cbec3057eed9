"""The way out of a sandbox that has no network (`node.sandbox`): a Unix socket in a folder."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from pathlib import Path

DOOR = "door"
"""Folder in a state directory with the socket."""

INSIDE = Path("/run/door")
"""The folder, as the sandbox sees it."""

_SOCKET = "appio"
_OPEN_TIMEOUT = 20.0


def door_from_inside() -> str:
    """The socket, as gRPC wants it."""
    return f"unix:{INSIDE / _SOCKET}"


def open_door(folder: Path, address: str) -> None:
    """Forward connections to the socket in a folder to ``host:port``, until this process ends.

    Only this user may enter the folder. OSError if the socket cannot be opened.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / _SOCKET).unlink(missing_ok=True)
    loop, opened = asyncio.new_event_loop(), threading.Event()
    host, _, port = address.rpartition(":")

    async def pass_on(inside: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            outside, requests = await asyncio.open_connection(host, int(port))
            await asyncio.gather(_copy(inside, requests), _copy(outside, answers))
        answers.close()

    def serve() -> None:
        # A socket's path has at most 107 bytes, a folder's more.
        entered = os.open(folder, os.O_PATH)
        path = f"/proc/self/fd/{entered}/{_SOCKET}"
        loop.run_until_complete(asyncio.start_unix_server(pass_on, path))
        opened.set()
        loop.run_forever()

    threading.Thread(target=serve, name="door", daemon=True).start()
    if not opened.wait(_OPEN_TIMEOUT):
        raise OSError(f"{folder / _SOCKET} cannot be opened")


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while part := await source.read(1 << 18):
            target.write(part)
            await target.drain()
    target.close()
