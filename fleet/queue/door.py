"""The socket of a queue, at which the system itself says which user calls.

A call is a JSON object, and the app bundle if there is one, each with its length before it. The
answer is a JSON object.
"""

from __future__ import annotations

import json
import os
import pwd
import socket
import socketserver
import sqlite3
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from flwr_distill.fleet.queue.entry import Order, QueuedRun, QueueError
from flwr_distill.fleet.queue.file import MAX_BUNDLE, MAX_ENDED, QueueFile, read_queue
from flwr_distill.protocol.socket_path import short_path

SOCKET = "queue.sock"
FILE = "queue.db"
MAX_CALL = 2 * 2**20
MAX_ANSWER = 64 * 2**20
CALL_SECONDS = 30.0
"""For a call, from its first byte to the end of its answer."""
MAX_CALLS = 8
"""Calls at a time of a user."""
_LENGTH = struct.Struct(">I")
_PEER = struct.Struct("=iII")


def call(folder: Path, bundle: bytes = b"", **request: Any) -> Any:
    """Make a call to the queue that is served in a folder, and return its answer.

    Raises `QueueError` if none is served there, or it refuses.
    """
    deadline = time.monotonic() + CALL_SECONDS
    try:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(CALL_SECONDS)
            with short_path(folder / SOCKET) as path:
                line.connect(path)
            with suppress(BrokenPipeError, ConnectionResetError):  # the answer may say why
                _send(line, json.dumps(request).encode(), deadline)
                _send(line, bundle, deadline)
            answer = json.loads(_receive(line, MAX_ANSWER, deadline))
    except PermissionError as error:
        remedy = "its users are the group that owns the folder"
        raise QueueError("does not admit you", where=folder / SOCKET, remedy=remedy) from error
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError) as error:
        remedy = "start one there with `flwr-distill queue serve`"
        raise QueueError("no queue is served here", where=folder, remedy=remedy) from error
    except (OSError, ValueError) as error:
        problem = f"the queue does not answer: {error}"
        raise QueueError(problem, where=folder / SOCKET, remedy="retry later") from error
    if "error" in answer:
        raise QueueError(**answer["error"])
    return answer["result"]


class Door(socketserver.ThreadingUnixStreamServer):
    """Answers the calls of a queue's users, in threads.

    Parameters
    ----------
    folder : Path
        Folder of the queue's file and of the socket, which is open to the folder's group.
    queue : QueueFile
        The queue.
    wake : Callable[[], None]
        Called after each change.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: Path, queue: QueueFile, wake: Callable[[], None]) -> None:
        self.queue = queue
        self.folder = folder
        self.wake = wake
        self._lock = threading.Lock()
        self._calls: Counter[int] = Counter()
        place = folder / SOCKET
        place.unlink(missing_ok=True)  # of a service that was killed
        old = os.umask(0o177)
        try:
            with short_path(place) as path:
                super().__init__(path, _Call)
        finally:
            os.umask(old)
        with suppress(PermissionError):  # of a group that this user is not in
            os.chown(place, -1, folder.stat().st_gid)
        place.chmod(0o660)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that leaves in the middle is its own affair."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def enter(self, uid: int) -> bool:
        """Count a call of a user; False if there are too many."""
        with self._lock:
            if self._calls[uid] >= MAX_CALLS:
                return False
            self._calls[uid] += 1
            return True

    def leave(self, uid: int) -> None:
        """Count a call less."""
        with self._lock:
            self._calls[uid] -= 1
            if not self._calls[uid]:
                del self._calls[uid]


class _Call(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        door = cast("Door", self.server)
        uid = _caller(self.request)
        deadline = time.monotonic() + CALL_SECONDS
        entered = door.enter(uid)
        try:
            try:
                if not entered:
                    problem = f"you make {MAX_CALLS} calls already, the most of a user at a time"
                    raise QueueError(problem, remedy="retry later")
                request = json.loads(_receive(self.request, MAX_CALL, deadline))
                bundle = _receive(self.request, MAX_BUNDLE, deadline)
                answer = {"result": answered(door, uid, request, bundle)}
            except QueueError as error:
                parts = ("problem", "where", "value", "remedy")
                answer = {"error": {name: getattr(error, name) for name in parts}}
            except (ValueError, RecursionError):  # of JSON, or numbers beyond all bounds
                answer = {"error": {"problem": "the call cannot be read"}}
            except sqlite3.Error as error:  # a full disk, or a damaged file
                answer = {"error": {"problem": f"the queue's file cannot be used: {error}"}}
            _send(self.request, json.dumps(answer).encode(), deadline)
        finally:
            if entered:
                door.leave(uid)


def answered(door: Door, uid: int, request: Any, bundle: bytes) -> Any:
    """The result of a user's call; QueueError if it is refused."""
    try:
        match request:
            case {"call": "add", "order": order}:
                number = door.queue.add(Order.model_validate(order), bundle, uid, user_name(uid))
                door.wake()
                return number
            case {"call": "cancel", "id": int(number)}:
                number = min(max(number, 0), 2**63 - 1)
                anyones = uid in (0, os.getuid())
                state = door.queue.cancel(number, uid, anyones=anyones)
                door.wake()
                return state
            case {"call": "list", "ended": int(ended)}:
                runs = read_queue(door.folder / FILE, ended=min(max(ended, 0), MAX_ENDED))
                return [run.model_dump() for run in runs]
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise QueueError(
            first["msg"], where=where, remedy="see `flwr-distill run --help`"
        ) from None
    raise QueueError("the queue does not know this call", remedy="is its version yours?")


def listed_runs(folder: Path, *, ended: int) -> list[QueuedRun]:
    """The runs of the queue that is served in a folder; raises as `call`."""
    return [QueuedRun(**run) for run in call(folder, call="list", ended=ended)]


def user_name(uid: int) -> str:
    """A user's name on this machine, or number without one."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _caller(line: socket.socket) -> int:
    """Id of the user at the other end; elsewhere than on Linux all count as this one."""
    if not hasattr(socket, "SO_PEERCRED"):
        return os.getuid()
    parts = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return int(_PEER.unpack(parts)[1])


def _send(line: socket.socket, content: bytes, deadline: float) -> None:
    line.settimeout(max(0.001, deadline - time.monotonic()))
    line.sendall(_LENGTH.pack(len(content)) + content)


def _receive(line: socket.socket, most: int, deadline: float) -> bytes:
    """A piece of a call or an answer; QueueError if it is longer than that."""
    (length,) = _LENGTH.unpack(_exactly(line, _LENGTH.size, deadline))
    if length > most:
        raise QueueError(f"{length} bytes are too many: {most} at most", where="call")
    return _exactly(line, length, deadline)


def _exactly(line: socket.socket, length: int, deadline: float) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        line.settimeout(max(0.001, deadline - time.monotonic()))
        part = line.recv(min(length - len(parts), 1 << 20))
        if not part:
            raise ConnectionError("the other end left")
        parts += part
    return bytes(parts)
