"""Nested plain data as JSON and arrays, and back; nothing is ever unpickled."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from torch import Tensor

Arrays = dict[str, NDArray[Any]]


class PackingError(TypeError):
    """A value is none that can be packed; the text says where and what it is."""


def pack(value: Any, arrays: Arrays, name: str = "") -> Any:
    """Turn nested data into what JSON holds, with the arrays in it put aside.

    Parameters
    ----------
    value : Any
        None, bool, int, float, str, bytes, NumPy arrays and numbers, tensors, ArrayRecords, and
        lists, tuples, sets and mappings of these, nested.
    arrays : dict[str, ndarray]
        Gets the arrays, each under its number and the path that leads to it.
    name : str (default: "")
        Path of the value.

    Returns
    -------
    Any
        For :func:`unpack`. Tuples and sets become lists; a tensor becomes an array.

    Raises
    ------
    PackingError
        If there is anything else in it.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, bytes):
        return {"bytes": _put_aside(np.frombuffer(value, dtype=np.uint8), arrays, name)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {"array": _put_aside(value, arrays, name)}
    if isinstance(value, ArrayRecord):
        record = {key: array.numpy() for key, array in value.items()}
        return {"record": pack(record, arrays, name)}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value) if isinstance(value, set | frozenset) else value
        return [pack(item, arrays, f"{name}/{i}") for i, item in enumerate(items)]
    if isinstance(value, Mapping):
        pairs = value.items()
        return {"map": [[_key(k, name), pack(v, arrays, f"{name}/{k}")] for k, v in pairs]}
    raise PackingError(f"{name or 'the value'} is a {type(value).__name__}, which is not kept")


def unpack(packed: Any, arrays: Mapping[str, NDArray[Any]]) -> Any:
    """Undo :func:`pack`.

    Raises
    ------
    KeyError, TypeError, ValueError
        If ``packed`` is not of its making.
    """
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
        return ArrayRecord({k: Array(v) for k, v in unpack(content, arrays).items()})
    if kind == "map":
        return {key: unpack(item, arrays) for key, item in content}
    raise ValueError(f"unknown kind {kind!r}")


def renamed(value: Any, names: Mapping[int, int]) -> Any:
    """Return nested data with some whole numbers replaced, as keys and as values.

    Parameters
    ----------
    value : Any
        As :func:`unpack` gives it.
    names : Mapping[int, int]
        Flower's node ids, before and now. They are random and of 64 bits: no count is one.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return names.get(value, value)
    if isinstance(value, list):
        return [renamed(item, names) for item in value]
    if isinstance(value, dict):
        return {renamed(key, names): renamed(item, names) for key, item in value.items()}
    return value


def _put_aside(array: NDArray[Any], arrays: Arrays, name: str) -> str:
    key = f"{len(arrays)}{name}"
    arrays[key] = np.asarray(array, order="C")
    return key


def _key(key: Any, name: str) -> int | str:
    if isinstance(key, np.integer):
        return int(key)
    if isinstance(key, int | str):
        return key
    raise PackingError(f"{name or 'the value'} has a {type(key).__name__} as a key")
