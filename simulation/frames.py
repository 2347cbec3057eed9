"""What server and workers send each other: frames on a socket, and arrays in shared memory.

A frame is JSON with bytes behind it. Arrays lie in files of a folder in memory, which the reader
maps: a model for many nodes is written once. Nothing is unpickled.
"""

import json
import math
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flwr_distill.protocol.arrays import Arrays, DecodedArray, as_arrays
from flwr_distill.task.errors import ReportedError

_LENGTHS = struct.Struct("<III")
MAX_INLINE = 32_768
"""Bytes of a frame on a socket. Larger ones lie in a file, so that no side waits for the other."""
_ALIGNMENT = 64
_KINDS: dict[str, type[MetricRecord] | type[ConfigRecord]] = {
    "metrics": MetricRecord,
    "config": ConfigRecord,
}


class SharedMemoryError(ReportedError):
    """The folder for arrays and large frames is full."""


@dataclass
class Frame:
    """JSON, and the bytes that it points to."""

    header: dict[str, Any]
    blobs: bytearray = field(default_factory=bytearray)

    def send(self, connection: socket.socket, folder: Path) -> None:
        """Send the frame, in a file of the folder if it is large."""
        header = json.dumps(self.header).encode()
        content, name = header + self.blobs, b""
        if len(content) > MAX_INLINE:
            name = f"frame-{secrets.token_hex(8)}".encode()
            with _written(folder / name.decode()) as file:
                file.write(content)
        lengths = _LENGTHS.pack(len(header), len(self.blobs), len(name))
        connection.sendall(lengths + (name or content))

    @classmethod
    def receive(cls, connection: socket.socket, folder: Path) -> "Frame":
        """Wait for a frame.

        Raises
        ------
        EOFError
            If the other side has ended.
        """
        header, blobs, name = _LENGTHS.unpack(_read(connection, _LENGTHS.size))
        if name:
            file = folder / _read(connection, name).decode()
            content = bytearray(file.read_bytes())
            file.unlink()
        else:
            content = _read(connection, header + blobs)
        return cls(json.loads(content[:header]), content[header:])


def _read(connection: socket.socket, size: int) -> bytearray:
    content = bytearray(size)
    view = memoryview(content)
    while view:
        if not (received := connection.recv_into(view)):
            raise EOFError("the other side has ended")
        view = view[received:]
    return content


class SharedArrays:
    """Array records in files of a folder in memory.

    Parameters
    ----------
    folder : Path
        Shared by server and workers.
    name : str
        Begins the names of this process's files.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._names = (f"{name}-{number}" for number in count())

    def write(self, record: ArrayRecord) -> dict[str, Any]:
        """Write a record's arrays into a file; return its name, and where they are in it."""
        return self.write_arrays(as_arrays(record))

    def write_arrays(self, arrays: Arrays) -> dict[str, Any]:
        """Write arrays into a file; see `write`."""
        name, end, places = next(self._names), 0, []
        with _written(self._folder / name) as file:
            for key, array in arrays.items():
                start = end + -end % _ALIGNMENT
                file.write(bytes(start - end))
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
                end = start + array.nbytes
                places.append([key, array.dtype.str, array.shape, start])
        return {"file": name, "arrays": places}

    def read(self, written: Mapping[str, Any]) -> dict[str, DecodedArray]:
        """Map a file that another process has written."""
        with (self._folder / written["file"]).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if size else b""
        arrays = {}
        for key, kind, shape, start in written["arrays"]:
            number = math.prod(shape)
            values = np.frombuffer(memory, kind, number, start) if number else np.empty(0, kind)
            arrays[key] = DecodedArray(values.reshape(shape))
        return arrays

    def delete(self, name: str) -> None:
        """Delete a file; who has mapped it keeps its arrays."""
        (self._folder / name).unlink(missing_ok=True)


@contextmanager
def _written(path: Path) -> Iterator[BinaryIO]:
    """Write a file; what there is no room for is deleted."""
    try:
        with path.open("wb") as file:
            yield file
    except OSError as error:
        path.unlink(missing_ok=True)
        raise SharedMemoryError(
            f"not writable: {error.strerror}", where=path.parent, remedy="free space there"
        ) from error


def encode_values(record: MetricRecord | ConfigRecord, blobs: bytearray) -> dict[str, Any]:
    """A record of values as JSON; bytes go behind it."""

    def encoded(value: Any) -> Any:
        if isinstance(value, bytes):
            blobs.extend(value)
            return {"end": len(blobs), "size": len(value)}
        return [encoded(item) for item in value] if isinstance(value, list) else value

    kind = "metrics" if isinstance(record, MetricRecord) else "config"
    return {"kind": kind, "values": {key: encoded(value) for key, value in record.items()}}


def decode_values(encoded: Mapping[str, Any], blobs: bytearray) -> MetricRecord | ConfigRecord:
    """The record of `encode_values`."""

    def decoded(value: Any) -> Any:
        if isinstance(value, dict):
            return bytes(blobs[value["end"] - value["size"] : value["end"]])
        return [decoded(item) for item in value] if isinstance(value, list) else value

    return _KINDS[encoded["kind"]]({key: decoded(v) for key, v in encoded["values"].items()})


def encode_content(
    content: RecordDict, write: Any, blobs: bytearray
) -> list[tuple[str, dict[str, Any]]]:
    """A message's content as JSON; `write` puts array records into shared memory."""
    return [
        (name, write(record) if isinstance(record, ArrayRecord) else encode_values(record, blobs))
        for name, record in content.items()
    ]


def decode_content(encoded: Any, read: Any, blobs: bytearray) -> RecordDict:
    """The content of `encode_content`."""
    content = RecordDict()
    for name, record in encoded:
        if "kind" in record:
            content[name] = decode_values(record, blobs)
        else:
            content[name] = arrays = ArrayRecord()
            arrays.update(read(record))  # its constructor would encode them again
    return content
