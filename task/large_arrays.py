"""Large arrays, in a file instead of memory."""

import io
import mmap
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from flwr_distill.task.errors import DatasetError

SHARE = 1 / 8
"""Part of the memory that one array may take."""
_ZEROS = bytes(1 << 20)
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory() -> int:
    """Bytes of memory of this machine, or what its container may use."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(machine, int(_CONTAINER_LIMIT.read_text(encoding="ascii")))
    except (OSError, ValueError):  # no container, or one without a limit
        return machine


def empty(shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
    """An array with no values yet; DatasetError if it needs a file and the disk has no room.

    One of over `SHARE` of the memory is in a file of the temporary folder, which nobody else can
    open and which is deleted with the array.
    """
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    if size <= SHARE * memory():
        return np.empty(shape, dtype)
    with tempfile.TemporaryFile() as file:
        try:
            _reserve(file, size)
        except OSError as error:
            raise _no_room(size, error) from error
        return np.frombuffer(mmap.mmap(file.fileno(), size), dtype).reshape(shape)


def _reserve(file: BinaryIO, size: int) -> None:
    """Fill a file, so that a full disk is an error now and no fatal signal when it is written."""
    if sys.platform == "linux":
        os.posix_fallocate(file.fileno(), 0, size)
    else:
        for begin in range(0, size, len(_ZEROS)):
            file.write(_ZEROS[: size - begin])
        file.flush()


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors behind one another along their first dimension, as `torch.cat` joins them."""
    first = parts[0]
    if first.device.type != "cpu" or first.dtype != torch.float32:
        return torch.cat(list(parts))
    out = torch.from_numpy(empty((sum(map(len, parts)), *first.shape[1:]), np.float32))
    return torch.cat(list(parts), out=out)


class Stack:
    """Stacks arrays of one shape, uint8 or float32 from 0 to 1, one by one.

    In memory up to `SHARE` of it, then in a file as from `empty`.
    """

    def __init__(self) -> None:
        self._file: BinaryIO = io.BytesIO()
        self._bytes = 0
        self._shape: tuple[int, ...] = ()
        self._types: list[np.dtype[Any]] = []

    def append(self, array: NDArray[Any]) -> None:
        """Add an array; raises DatasetError if the disk has no room for it."""
        self._bytes += array.nbytes
        try:
            if isinstance(self._file, io.BytesIO) and self._bytes > SHARE * memory():
                file = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the stack)
                file.write(self._file.getbuffer())
                self._file = file
            self._file.write(np.ascontiguousarray(array).data)
        except OSError as error:
            raise _no_room(self._bytes, error) from error
        self._shape = array.shape
        self._types.append(array.dtype)

    def stacked(self) -> NDArray[Any]:
        """The arrays (n, ...): uint8 if all are, else all as float32."""
        buffer = self._buffer()
        kinds = set(self._types)
        if len(kinds) == 1:
            return np.frombuffer(buffer, kinds.pop()).reshape(-1, *self._shape)
        stacked, begin = empty((len(self._types), *self._shape), np.float32), 0
        for into, kind in zip(stacked, self._types, strict=True):
            array = np.frombuffer(buffer, kind, into.size, begin).reshape(into.shape)
            into[:] = array / np.float32(255) if kind == np.uint8 else array
            begin += array.nbytes
        return stacked

    def _buffer(self) -> memoryview | mmap.mmap:
        if isinstance(self._file, io.BytesIO):
            return self._file.getbuffer()
        self._file.flush()
        return mmap.mmap(self._file.fileno(), 0)


def stacked(arrays: Iterable[NDArray[Any]]) -> NDArray[Any]:
    """Stack arrays of one shape as a `Stack` does."""
    stack = Stack()
    for array in arrays:
        stack.append(array)
    return stack.stacked()


def _no_room(size: int, error: OSError) -> DatasetError:
    return DatasetError(
        f"has no room for images of {size / 2**30:.1f} GiB, over an eighth of the memory: "
        f"{error.strerror}",
        where=tempfile.gettempdir(),
        remedy="set TMPDIR to a folder on a disk with room, or make private.shape smaller",
    )
