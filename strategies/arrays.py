"""A model's arrays out of Flower's records and replies, and into records and tensors."""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message
from numpy.typing import NDArray
from torch import Tensor, nn

from task.messages import ARRAYS


def read_array(name: str, array: Array) -> NDArray[np.generic]:
    """Decode an array that came from elsewhere; nothing in it is trusted, nothing unpickled.

    Raises
    ------
    ValueError
        If its bytes are not those of an array of numbers.
    """
    try:
        values = array.numpy()
    except Exception as error:  # whatever NumPy's reader makes of hostile bytes
        raise ValueError(f"{name} cannot be read ({type(error).__name__})") from error
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "fiub":
        raise ValueError(f"{name} is not an array of numbers")
    return values


def as_arrays(record: ArrayRecord) -> dict[str, NDArray[np.generic]]:
    """Arrays of a record, by name; see `read_array`."""
    return {name: read_array(name, array) for name, array in record.items()}


class SentArrays(Mapping[str, NDArray[np.generic]]):
    """Arrays of a record that came from elsewhere, by name.

    Each is decoded when it is asked for, and not kept, so that those of many nodes need little
    memory: ask once, and for one at a time. See `read_array`.
    """

    def __init__(self, record: ArrayRecord) -> None:
        self._record = record

    def __getitem__(self, name: str) -> NDArray[np.generic]:
        return read_array(name, self._record[name])

    def __contains__(self, name: object) -> bool:
        return name in self._record

    def __iter__(self) -> Iterator[str]:
        return iter(self._record)

    def __len__(self) -> int:
        return len(self._record)


def sent_arrays(reply: Message, name: str = ARRAYS) -> SentArrays:
    """Arrays of the record of this name in a reply; none where it lacks it."""
    return SentArrays(reply.content.array_records.get(name, ArrayRecord()))


def as_tensors(arrays: Mapping[str, NDArray[np.generic]]) -> dict[str, Tensor]:
    """Arrays as tensors of their own memory."""
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}


def as_record(arrays: Mapping[str, NDArray[np.generic]]) -> ArrayRecord:
    """Record of arrays."""
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def array_types(model: nn.Module) -> dict[str, np.dtype[np.generic]]:
    """Types of the arrays of a model's state, by name."""
    state = model.state_dict()
    return {name: tensor.new_empty(0, device="cpu").numpy().dtype for name, tensor in state.items()}


def trained_names(model: nn.Module) -> list[str]:
    """Names of those arrays of a model's state that are trained, not counted or tracked."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]
