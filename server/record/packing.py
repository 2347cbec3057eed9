"""Packs nested data as JSON plus arrays, without pickle."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from torch import Tensor

from flwr_distill.protocol.arrays import as_arrays
from flwr_distill.task.errors import ReportedError

Arrays = dict[str, NDArray[Any]]


class PackingError(ReportedError):
    """A value cannot be stored in a checkpoint."""


def pack(value: Any, arrays: Arrays, name: str = "") -> Any:
    """Turn nested data into JSON data, with its arrays moved to `arrays`.

    Takes None, bool, int, float, str, bytes, NumPy arrays and numbers, tensors, ArrayRecords, and
    lists, tuples, sets and mappings of these; raises PackingError otherwise. Tuples and sets become
    lists, tensors become arrays, and arrays are copied, but for those of records, which nobody
    changes. `name` is the path of the value, for errors and array names.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, bytes):
        return {"bytes": _move(np.frombuffer(value, dtype=np.uint8), arrays, name)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {"array": _move(value, arrays, name)}
    if isinstance(value, ArrayRecord):
        return {"record": {"map": _record(value, arrays, name)}}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value) if isinstance(value, set | frozenset) else value
        return [pack(item, arrays, f"{name}/{i}") for i, item in enumerate(items)]
    if isinstance(value, Mapping):
        pairs = value.items()
        return {"map": [[_key(k, name), pack(v, arrays, f"{name}/{k}")] for k, v in pairs]}
    raise PackingError(f"a {type(value).__name__} cannot be saved", where=name)


def unpack(packed: Any, arrays: Mapping[str, NDArray[Any]]) -> Any:
    """Undo :func:`pack`; KeyError, TypeError or ValueError if `packed` was not made by it."""
    if isinstance(packed, list):
        return [unpack(item, arrays) for item in packed]
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "array":
        return arrays[content]
    if kind == "bytes":
        return arrays[content].tobytes()
    if kind == "record":
        return ArrayRecord({k: Array(v) for k, v in dict(unpack(content, arrays)).items()})
    if kind == "map":
        return {key: unpack(item, arrays) for key, item in content}
    raise ValueError(f"unknown kind {kind!r}")


def renamed(value: Any, names: Mapping[int, int]) -> Any:
    """Replace node ids in unpacked data, as keys and as values.

    Ids are random 64-bit numbers, so no other integer is mistaken for one.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return names.get(value, value)
    if isinstance(value, list):
        return [renamed(item, names) for item in value]
    if isinstance(value, dict):
        return {renamed(key, names): renamed(item, names) for key, item in value.items()}
    return value


def _record(record: ArrayRecord, arrays: Arrays, name: str) -> list[list[Any]]:
    try:
        values = as_arrays(record)
    except ValueError as error:
        raise PackingError(str(error), where=name) from error
    return [[key, {"array": _keep(values[key], arrays, f"{name}/{key}")}] for key in record]


def _move(array: NDArray[Any], arrays: Arrays, name: str) -> str:
    return _keep(np.array(array, order="C"), arrays, name)


def _keep(array: NDArray[Any], arrays: Arrays, name: str) -> str:
    key = f"{len(arrays)}{name}"
    arrays[key] = array
    return key


def _key(key: Any, name: str) -> int | str:
    if isinstance(key, np.integer):
        return int(key)
    if isinstance(key, int | str):
        return key
    raise PackingError(f"it has a {type(key).__name__} as a key", where=name)
