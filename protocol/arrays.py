"""Arrays of a model: into Flower's records and out of them, and checks of those from elsewhere."""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message
from numpy.typing import NDArray
from torch import Tensor, nn

from protocol.messages import ARRAYS

Arrays = Mapping[str, NDArray[np.generic]]


class DecodedArray(Array):
    """A Flower array that was decoded and checked once, when it came.

    Parameters
    ----------
    values : ndarray
        Read-only from now on.
    """

    def __init__(self, values: NDArray[np.generic]) -> None:
        values.flags.writeable = False
        self.dtype, self.shape, self.stype = str(values.dtype), values.shape, "numpy.ndarray"
        self.is_finite = bool(np.isfinite(values).all())
        self._values = values

    def numpy(self) -> NDArray[np.generic]:
        """The values, read-only."""
        return self._values

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """The array's bytes, encoded anew."""
        return Array(self.numpy()).data


DecodedArray.__qualname__ = Array.__qualname__  # Flower writes it into messages


class RecordArrays(Mapping[str, NDArray[np.generic]]):
    """Arrays of a record by name, each read when it is asked for, and not kept."""

    def __init__(self, record: ArrayRecord) -> None:
        self._record = record

    def __getitem__(self, name: str) -> NDArray[np.generic]:
        return self._record[name].numpy()

    def __iter__(self) -> Iterator[str]:
        return iter(self._record)

    def __len__(self) -> int:
        return len(self._record)


def decode(record: ArrayRecord) -> None:
    """Decode the arrays of a record that came from elsewhere, in place and once.

    Nothing in them is trusted, nothing is unpickled.

    Raises
    ------
    ValueError
        If the bytes of an array are not those of an array of numbers; the text names it.
    """
    for name, array in record.items():
        if not isinstance(array, DecodedArray):
            record[name] = DecodedArray(_values(name, array))


def as_arrays(record: ArrayRecord) -> dict[str, NDArray[np.generic]]:
    """Arrays of a record, by name; the record stays as it is.

    Raises
    ------
    ValueError
        If the bytes of an array are not those of an array of numbers; the text names it.
    """
    return {name: _values(name, array) for name, array in record.items()}


def finite_arrays(record: ArrayRecord) -> Arrays:
    """Arrays of a record that came from elsewhere, by name.

    Raises
    ------
    ValueError
        If an array cannot be read, or holds NaN or infinity; the text says which.
    """
    decode(record)
    for name, array in record.items():
        if isinstance(array, DecodedArray) and not array.is_finite:
            raise ValueError(f"{name} holds NaN or infinity")
    return RecordArrays(record)


def model_arrays(record: ArrayRecord, like: Arrays) -> Arrays:
    """Arrays of a model that came from elsewhere, if it can be averaged with our own.

    Parameters
    ----------
    record : ArrayRecord
        Of the model that came.
    like : Mapping[str, ndarray]
        Of a model as it should be.

    Raises
    ------
    ValueError
        If names, shapes or types differ, or a value is not finite; the text says which.
    """
    _check_names(record, like)
    decode(record)
    for name, array in record.items():
        _check_form(name, array.shape, array.dtype, like[name])
    return finite_arrays(record)


def check_arrays(arrays: Arrays, like: Arrays) -> Arrays:
    """Check arrays of a model as `model_arrays` does those of a record; return them.

    Raises
    ------
    ValueError
        If names, shapes or types differ, or a value is not finite; the text says which.
    """
    _check_names(arrays, like)
    for name, array in arrays.items():
        _check_form(name, array.shape, str(array.dtype), like[name])
        if not np.isfinite(array).all():
            raise ValueError(f"{name} holds NaN or infinity")
    return arrays


def _values(name: str, array: Array) -> NDArray[np.generic]:
    try:
        values = array.numpy()
    except Exception as error:  # whatever NumPy's reader makes of hostile bytes
        raise ValueError(f"{name} cannot be read ({type(error).__name__})") from error
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "fiub":
        raise ValueError(f"{name} is not an array of numbers")
    return values


def _check_names(arrays: Mapping[str, object], like: Arrays) -> None:
    if arrays.keys() != like.keys():
        odd = sorted(arrays.keys() ^ like.keys())
        raise ValueError(f"its arrays are not this run's model's ({', '.join(odd[:3])} differ)")


def _check_form(name: str, shape: tuple[int, ...], dtype: str, wanted: NDArray[np.generic]) -> None:
    if shape != wanted.shape or dtype != str(wanted.dtype):
        raise ValueError(
            f"{name} is {dtype} {shape}, this run's model has {wanted.dtype} {wanted.shape}"
        )


def sent_arrays(reply: Message, name: str = ARRAYS) -> ArrayRecord:
    """The array record of this name in a reply; an empty one where it lacks it."""
    return reply.content.array_records.get(name, ArrayRecord())


def as_tensors(arrays: Arrays) -> dict[str, Tensor]:
    """Arrays as tensors of their own memory."""
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}


def as_record(arrays: Arrays) -> ArrayRecord:
    """Record of arrays."""
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def arrays_of(model: nn.Module) -> dict[str, NDArray[np.generic]]:
    """A model's state as arrays on the CPU."""
    return {name: value.detach().cpu().numpy() for name, value in model.state_dict().items()}


def array_types(model: nn.Module) -> dict[str, np.dtype[np.generic]]:
    """Types of the arrays of a model's state, by name."""
    state = model.state_dict()
    return {name: tensor.new_empty(0, device="cpu").numpy().dtype for name, tensor in state.items()}


def trained_names(model: nn.Module) -> list[str]:
    """Names of those arrays of a model's state that are trained, not counted or tracked."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]
