"""Coded models in messages: what both ends of a link agree on.

A message whose model is coded, or whose reply is to be, has a record `CODEC`. Coded arrays keep
their names, types and shapes; `stype` names the codec. Those of a reply are what training changed
in the model that the node got, so the server adds them to the one that it sent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord
from numpy.typing import NDArray
from pydantic import Field

from flwr_distill.protocol.arrays import Arrays, DecodedArray, RecordArrays, digest
from flwr_distill.protocol.codecs import CODECS, EXACT, CodecError
from flwr_distill.task.settings import Block

CODEC = "codec"
"""Config record of a message: a `Coding`."""
PREFIX = "flwr-distill."
"""Begins the `stype` of a coded array; the codec's name follows."""
SAME = "same"
"""In place of a codec: the array is that of the model which the node has."""
DELTA = "delta-"
"""Begins the name of a codec that is used for the difference to a model that the node has."""
MAX_RATIO = 16
"""Times its packed bytes that an array may have which is packed without loss: nothing else bounds
what a node claims of it."""
FEWEST = 256
"""Values from which an array is coded; smaller ones bring nothing."""
STATISTICS = ("running_mean", "running_var")
"""Last parts of the names of arrays that stay exact, as integers do: they are not trained."""

BESIDE = "beside"
"""Among the codecs of nodes that code array records beside the model (`Method.coded`), too."""

UpCodec = Literal["float32", "float16", "bfloat16", "int8", "int4", "topk"]
DownCodec = Literal[
    "float32",
    "float16",
    "bfloat16",
    "int8",
    "int4",
    "delta-float16",
    "delta-bfloat16",
    "delta-int8",
    "delta-int4",
    "delta-topk",
]
UpSetting = Literal[UpCodec, "auto"]
DownSetting = Literal[DownCodec, "auto"]
Version = Annotated[str, Field(pattern="^([0-9a-f]{64})?$")]
Beside = Annotated[str, Field(pattern="^[a-z0-9-]{1,40}$")]
"""Name of a record, of which nodes make names of files."""


class Coding(Block):
    """How the model of a message is coded, and how that of the reply is to be."""

    up: UpCodec = "float32"
    """Codec of the reply's model."""
    version: Version = ""
    """Hash of the message's model, once it is decoded; empty if it has none."""
    base: Version = ""
    """Hash of the model to which coded arrays are differences; empty if to none. Without a model in
    the message, those of the reply."""
    keep: Annotated[list[Version], Field(max_length=4)] = Field(default_factory=list)
    """Hashes of models that the node is to keep besides."""
    round: Annotated[int, Field(ge=0)] = 0
    """The round, by which a node keeps what it has left out."""
    received: Annotated[int, Field(ge=-1)] = -1
    """Last round whose reply of this type counted."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """For random rounding of the reply."""
    beside: Annotated[list[Beside], Field(max_length=4)] = Field(default_factory=list)
    """Array records of the reply that are coded as well, each in itself."""

    def to_record(self) -> ConfigRecord:
        """The record of a message, which nodes without `BESIDE` read, too."""
        unknown = set() if self.beside else {"beside"}
        return ConfigRecord(self.model_dump(by_alias=True, exclude=unknown))


def version_of(arrays: Arrays) -> str:
    """Hash of a model: of its values, and of the names, shapes and types of its arrays."""
    forms = [[name, str(array.dtype), array.shape] for name, array in sorted(arrays.items())]
    return digest(json.dumps(forms), arrays)


def may_be_coded(name: str, array: Array) -> bool:
    """Whether a codec may be used for an array of this name, type and shape."""
    size = math.prod(array.shape) if all(length > 0 for length in array.shape) else 0
    trained = name.rpartition(".")[2] not in STATISTICS
    return array.dtype == "float32" and size >= FEWEST and trained


def fits(values: NDArray[Any], codec: str) -> bool:
    """Whether a codec can write these values: all finite, and none beyond its largest number."""
    return bool(np.abs(values).max(initial=0) <= CODECS[codec].largest)  # False with NaN


def coded(
    record: ArrayRecord,
    codec: str,
    rng: np.random.Generator,
    start: Mapping[str, NDArray[Any]] | None = None,
    rest: Mapping[str, NDArray[Any]] | None = None,
) -> tuple[ArrayRecord, dict[str, NDArray[Any]]]:
    """Code the arrays of a record where a codec may be used; others are as before.

    Parameters
    ----------
    record : ArrayRecord
        A model.
    codec : str
        A key of `CODECS`.
    rng : Generator
        For random rounding.
    start : Arrays, optional (default: None)
        What is coded is the difference to these; an array that is not like the one here stays as it
        is.
    rest : Arrays, optional (default: None)
        What was left out before, and is added. With it, if only an empty one, what is left out now
        is returned of any codec.

    Returns
    -------
    ArrayRecord
        The coded record.
    dict
        What a biased codec has left out now, by name; see `rest`.
    """
    result, left = ArrayRecord(), {}
    method = CODECS[codec]
    values = RecordArrays(record)
    for name, array in record.items():
        result[name] = array
        if not may_be_coded(name, array):
            continue
        own: NDArray[Any] = values[name]
        if start is not None:
            if not _alike(own, start.get(name)):
                continue
            own = own - start[name]
        if rest and _alike(own, rest.get(name)):
            own = own + rest[name]
        if not fits(own, codec):
            continue
        packed = method.pack(own, rng)
        if codec == EXACT and own.nbytes > MAX_RATIO * len(packed):
            continue
        result[name] = Array(array.dtype, array.shape, PREFIX + codec, packed)
        if not method.unbiased or rest is not None:
            left[name] = own - method.unpack(packed, own.shape)
    return result, left


def check_claims(arrays: Iterable[Array], most: int) -> None:
    """Check that coded ones among arrays, once decoded, have no more than so many bytes.

    Raises CodecError if they have.
    """
    size = sum(4 * abs(math.prod(a.shape)) for a in arrays if a.stype.startswith(PREFIX))
    if size > most:
        raise CodecError(f"coded arrays of more than the {most:,} bytes allowed")


def unchanged(arrays: Arrays) -> ArrayRecord:
    """A record that stands for the model that a node has: names and forms without values."""
    record = ArrayRecord()
    for name, array in arrays.items():
        record[name] = Array(str(array.dtype), array.shape, PREFIX + SAME, b"")
    return record


def decoded(
    record: ArrayRecord,
    start: Mapping[str, NDArray[Any]] | None = None,
    *,
    exact: bool = True,
) -> ArrayRecord:
    """The record with coded arrays decoded, and added to those of `start` if there is one.

    With ``exact=False`` none may be packed without loss: what such an array unpacks to is bounded
    by its own bytes alone.

    Raises
    ------
    CodecError
        If an array is coded and cannot be decoded, may not be coded, or differs in form from the
        one in `start`.
    """
    result = ArrayRecord()
    for name, array in record.items():
        if not array.stype.startswith(PREFIX):
            result[name] = array
            continue
        codec = array.stype.removeprefix(PREFIX)
        shape, own = tuple(array.shape), None if start is None else start.get(name)
        if codec == EXACT:
            if not exact:
                raise CodecError(f"{name} is packed without loss, and no message asks for that")
            check_claims([array], MAX_RATIO * len(array.data))
            own = None
        elif start is not None and (
            own is None or (own.shape, str(own.dtype)) != (shape, array.dtype)
        ):
            raise CodecError(f"{name} is coded, but not like the model that was sent")
        if codec == SAME and own is not None:
            result[name] = DecodedArray(own)
            continue
        if codec not in CODECS or not may_be_coded(name, array):
            raise CodecError(f"{name} is coded in an unknown way, or may not be coded")
        try:
            values = CODECS[codec].unpack(array.data, shape)
        except CodecError as error:
            raise CodecError(f"{name}: {error}") from None
        result[name] = DecodedArray(values if own is None else own + values)
    return result


def _alike(array: NDArray[Any], other: NDArray[Any] | None) -> bool:
    return other is not None and (array.shape, array.dtype) == (other.shape, other.dtype)


def codec_of(down: str) -> tuple[str, bool]:
    """The codec in the name of one for models to nodes, and whether it codes differences."""
    return down.removeprefix(DELTA), down.startswith(DELTA)
