"""A model's arrays: conversion to and from Flower's records, and checks of received ones."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from functools import cache
from io import BytesIO
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message
from numpy.typing import NDArray

from flwr_distill.protocol.messages import ARRAYS

if TYPE_CHECKING:
    from torch import Tensor, nn

Arrays = Mapping[str, NDArray[np.generic]]

_STYPE = "numpy.ndarray"
"""What Flower calls arrays in NumPy's format."""
_MAGIC = np.lib.format.magic(1, 0)
"""How they begin, but for a header beyond 64 KB or with names in Unicode."""

VARIANCE = "running_var"
"""Last part of the name of batch normalisation's variances, of which models take the root."""


class DecodedArray(Array):
    """A received Flower array, decoded and checked once; its values become read-only."""

    def __init__(self, values: NDArray[np.generic]) -> None:
        values.flags.writeable = False
        self.dtype, self.shape, self.stype = _name(values.dtype), values.shape, _STYPE
        self._values = values
        self._is_finite: bool | None = None

    @property
    def values(self) -> NDArray[np.generic]:
        """The values, read-only."""
        return self._values

    @property
    def is_finite(self) -> bool:
        """Whether no value is NaN or infinity; computed once."""
        if self._is_finite is None:
            self._is_finite = bool(np.isfinite(self.values).all())
        return self._is_finite

    def numpy(self) -> NDArray[np.generic]:
        """A copy of the values, as Flower's arrays give: some strategies compute in place."""
        return self.values.copy()

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """The array's bytes, encoded again on each access."""
        return Array(self.values).data

    @property
    def num_bytes(self) -> int:
        """The length of `data`, without encoding the array."""
        dtype = np.dtype(self.dtype)
        return _header_bytes(dtype, self.shape) + dtype.itemsize * math.prod(self.shape)


@cache
def _name(dtype: np.dtype[np.generic]) -> str:
    return str(dtype)


@cache
def _header_bytes(dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> int:
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    file = BytesIO()
    np.lib.format.write_array_header_1_0(file, header)
    return file.tell()


DecodedArray.__qualname__ = Array.__qualname__  # Flower writes it into messages


class RecordArrays(Mapping[str, NDArray[np.generic]]):
    """Arrays of a record by name, decoded on each access instead of kept."""

    def __init__(self, record: ArrayRecord) -> None:
        self._record = record

    def __getitem__(self, name: str) -> NDArray[np.generic]:
        return _values(name, self._record[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._record)

    def __len__(self) -> int:
        return len(self._record)


def decode(record: ArrayRecord) -> None:
    """Decode a received record's arrays in place, once. Nothing is trusted or unpickled.

    Raises ValueError if an array cannot be read or does not contain numbers.
    """
    for name, array in record.items():
        if not isinstance(array, DecodedArray):
            record[name] = DecodedArray(_values(name, array))


def as_arrays(record: ArrayRecord) -> dict[str, NDArray[np.generic]]:
    """Arrays of a record by name, read-only where they share its memory.

    Raises ValueError if an array cannot be read or does not contain numbers.
    """
    return {name: _values(name, array) for name, array in record.items()}


def num_bytes(record: ArrayRecord) -> int:
    """Bytes of a record as Flower counts them: names, and arrays as they are encoded."""
    return sum(
        len(name) + (array.num_bytes if isinstance(array, DecodedArray) else len(array.data))
        for name, array in record.items()
    )


def finite_arrays(record: ArrayRecord) -> Arrays:
    """Arrays of a received record by name.

    Raises ValueError if an array cannot be read, or holds NaN or infinity.
    """
    decode(record)
    for name, array in record.items():
        if isinstance(array, DecodedArray) and not array.is_finite:
            raise ValueError(f"{name} holds NaN or infinity")
    return RecordArrays(record)


def not_finite(record: ArrayRecord) -> list[str]:
    """Names of a record's arrays that hold NaN or infinity."""
    return [name for name, array in as_arrays(record).items() if not np.isfinite(array).all()]


def model_arrays(record: ArrayRecord, like: Arrays) -> Arrays:
    """Arrays of a received model, checked to match ``like`` so that they can be averaged.

    The record gets the order of ``like``, because some of Flower's strategies go by position.

    Raises ValueError if names, shapes or types differ from ``like``, a value is not finite, or a
    variance of batch normalisation is below 0.
    """
    _check_names(record, like)
    if list(record) != list(like):
        for name in like:
            record[name] = record.pop(name)
    decode(record)
    for name, array in record.items():
        _check_form(name, array.shape, array.dtype, like[name])
    arrays = finite_arrays(record)
    _check_variances(arrays)
    return arrays


def check_arrays(arrays: Arrays, like: Arrays) -> Arrays:
    """Check arrays as `model_arrays` checks those of a record; return them.

    Raises ValueError as `model_arrays` does.
    """
    _check_names(arrays, like)
    for name, array in arrays.items():
        _check_form(name, array.shape, str(array.dtype), like[name])
        if not np.isfinite(array).all():
            raise ValueError(f"{name} holds NaN or infinity")
    _check_variances(arrays)
    return arrays


def _values(name: str, array: Array) -> NDArray[np.generic]:
    if isinstance(array, DecodedArray):
        return array.values
    try:
        values = _in_place(array)
        if values is None:
            values = array.numpy()
    except Exception as error:  # hostile bytes make NumPy raise all sorts
        raise ValueError(f"{name} cannot be read ({type(error).__name__})") from error
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "fiub":
        raise ValueError(f"{name} is not an array of numbers")
    return _in_c_order(values)


def _in_place(array: Array) -> NDArray[np.generic] | None:
    """Values of an encoded array where they lie, read-only; None if NumPy has to read it."""
    if array.stype != _STYPE or not array.data.startswith(_MAGIC):
        return None
    file = BytesIO(array.data)
    np.lib.format.read_magic(file)
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
    if fortran_order or dtype.hasobject or min(shape, default=0) < 0:
        return None
    values = np.frombuffer(array.data, dtype, math.prod(shape), file.tell())
    values.flags.writeable = False
    return values.reshape(shape)


def _in_c_order(values: NDArray[Any]) -> NDArray[Any]:
    """The same values, as files of safetensors need them: bytes are written as they lie."""
    return np.require(values, requirements="C")


def _check_names(arrays: Mapping[str, object], like: Arrays) -> None:
    if arrays.keys() != like.keys():
        odd = sorted(arrays.keys() ^ like.keys())
        raise ValueError(f"its arrays are not this run's model's ({', '.join(odd[:3])} differ)")


def _check_form(name: str, shape: tuple[int, ...], dtype: str, wanted: NDArray[np.generic]) -> None:
    if shape != wanted.shape or dtype != str(wanted.dtype):
        raise ValueError(
            f"{name} is {dtype} {shape}, this run's model has {wanted.dtype} {wanted.shape}"
        )


def _check_variances(arrays: Arrays) -> None:
    for name in arrays:
        if name.rpartition(".")[2] == VARIANCE and np.less(arrays[name], 0).any():
            raise ValueError(f"{name} holds a variance below 0")


def sent_arrays(reply: Message, name: str = ARRAYS) -> ArrayRecord:
    """The array record of this name in a reply; empty if there is none."""
    return reply.content.array_records.get(name, ArrayRecord())


def as_tensors(arrays: Arrays) -> dict[str, Tensor]:
    """Arrays as tensors with memory of their own."""
    import torch  # here: settings are checked where nothing else needs it

    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}


def load_arrays(model: nn.Module, arrays: Arrays) -> None:
    """Copy arrays into a model's state, without another copy on the way.

    Raises RuntimeError if names or shapes are not those of the state.
    """
    import torch

    views = {name: _unmarked(np.asarray(array)) for name, array in arrays.items()}
    model.load_state_dict({name: torch.from_numpy(view) for name, view in views.items()})


def _unmarked(array: NDArray[Any]) -> NDArray[Any]:
    """The array without its mark as read-only, of which PyTorch warns; only to read from."""
    interface = {**array.__array_interface__, "data": (array.ctypes.data, False)}
    return np.asarray(SimpleNamespace(__array_interface__=interface, memory=array))


def as_record(arrays: Arrays) -> ArrayRecord:
    """Flower's record of arrays."""
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def moved_into_record(arrays: dict[str, NDArray[np.generic]]) -> ArrayRecord:
    """Flower's record of arrays, which leave `arrays` as they are encoded, to save memory."""
    record = ArrayRecord()
    for name in list(arrays):
        record[name] = Array(np.asarray(arrays.pop(name)))
    return record


def record_of(model: nn.Module) -> ArrayRecord:
    """A model's state as a record; its arrays are encoded where they are sent, if at all."""
    record = ArrayRecord()
    for name, values in arrays_of(model).items():
        record[name] = DecodedArray(values.copy())  # the model may train on
    return record


def arrays_of(model: nn.Module) -> dict[str, NDArray[np.generic]]:
    """A model's state as arrays on the CPU."""
    state = model.state_dict()
    return {name: _in_c_order(value.detach().cpu().numpy()) for name, value in state.items()}


def trained_names(model: nn.Module) -> list[str]:
    """Names of the arrays of a model's state that are trained; others are statistics.

    A parameter that several layers share has all its names: each of them is an array of the state.
    """
    parameters = model.named_parameters(remove_duplicate=False)
    return [name for name, parameter in parameters if parameter.requires_grad]


def digest(content: str, arrays: Arrays) -> str:
    """SHA-256 of a text and of arrays by name."""
    found = hashlib.sha256(content.encode())
    for name in sorted(arrays):
        found.update(_in_c_order(arrays[name]).reshape(-1).view(np.uint8).data)
    return found.hexdigest()
