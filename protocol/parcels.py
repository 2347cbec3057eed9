"""Models in parcels: what nodes send each other takes the run's codecs, too.

A plain model is a safetensors file. In a coded one each coded array is its packed bytes, and the
metadata have the codec and the shapes.

What training changed is coded as the difference where the receiver has the global model. Its copy
may be another than the sender's, which may have been coded on its way: the receiver adds to its
own. Other models are sent whole, in float16, since steps of their largest values would ruin them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

import numpy as np
import zstandard
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from flwr_distill.protocol.arrays import Arrays, DecodedArray, as_arrays
from flwr_distill.protocol.codecs import CODECS, CodecError
from flwr_distill.protocol.coded import (
    DELTA,
    PREFIX,
    UpCodec,
    codec_of,
    coded,
    decoded,
    fits,
    may_be_coded,
)
from flwr_distill.protocol.coded import version_of as hash_of
from flwr_distill.protocol.messages import PARCEL_CODEC
from flwr_distill.task.settings import Block

ParcelCodec = Literal[
    "float16",
    "bfloat16",
    "delta-float16",
    "delta-bfloat16",
    "delta-int8",
    "delta-int4",
]
ABILITY = f"parcels-{'-'.join(map(str, zstandard.ZSTD_VERSION))}"
"""Among the codecs of nodes that read such parcels, which must be packed by one version of it."""
FOR_CHANGES: Mapping[str, UpCodec] = {"topk": "int4", "auto": "int8"}
"""In place of the run's codec: what topk leaves out must come later, and no node's link counts."""
_METADATA, _KEY = "__metadata__", "coded"
_MAX_HEADER = 2 << 20
"""Bytes of a payload's list of arrays, which takes many times as much once it is read."""
_MAX_DIMENSIONS = 32
_MAX_ABOUT = 700
"""Characters of metadata for each array, beside its name: its shape."""


class ParcelCoding(Block):
    """How a node codes the model in its parcels; a message without it asks for a plain one."""

    codec: ParcelCodec


def codec_of_changes(up: str) -> str:
    """Codec of what training changed in a model, for a receiver that has the model."""
    return up if up == "float32" else DELTA + FOR_CHANGES.get(up, up)


def codec_of_whole(codec: str) -> str:
    """Codec of a whole model, by that of replies for trained ones, else that of models to nodes."""
    base, _ = codec_of(codec)
    return base if base in ("float32", "bfloat16") else "float16"


def coding_record(codec: str, able: Iterable[Collection[str]]) -> dict[str, ConfigRecord]:
    """The record for nodes that send each other models, by its name; `able` are their codecs.

    Empty if models are sent plain, which they are if one of the nodes has no such codec.
    """
    if codec == "float32" or not all(ABILITY in codecs for codecs in able):
        return {}
    coding = ParcelCoding.checked({"codec": codec}, PARCEL_CODEC)
    return {PARCEL_CODEC: ConfigRecord(coding.model_dump(by_alias=True))}


def asked_codec(content: RecordDict) -> str:
    """Codec in which a message has a node send; ``float32`` is plain.

    Raises SettingsError if its record is malformed.
    """
    record = content.config_records.get(PARCEL_CODEC)
    return "float32" if record is None else ParcelCoding.checked(record, PARCEL_CODEC).codec


def to_payload(arrays: Arrays, codec: str, start: Arrays | None = None) -> bytes:
    """A model as the payload of a parcel.

    Parameters
    ----------
    arrays : Arrays
        The model. Its hash seeds random rounding, so that it gives equal bytes whenever it is sent.
    codec : str
        ``float32`` or a :data:`ParcelCodec`.
    start : Arrays, optional (default: None)
        The model to which a codec of differences builds them.
    """
    if codec == "float32":
        return save({name: np.require(array, requirements="C") for name, array in arrays.items()})
    method, is_delta = codec_of(codec)
    record = ArrayRecord()
    for name, array in arrays.items():
        record[name] = DecodedArray(np.asarray(array).view())
    rng = np.random.default_rng(int(hash_of(arrays), 16))
    return _to_bytes(coded(record, method, rng, start if is_delta else None)[0], codec)


def from_payload(content: bytes, most: int, start: Arrays | None = None) -> Arrays:
    """The model in a payload, as its receiver has it; see `read_payload`.

    Raises CodecError too if it is a difference, and `start` is None or unlike it.
    """
    record, codec = read_payload(content, most)
    is_delta = codec_of(codec)[1]
    if is_delta and start is None:
        raise CodecError("it is a difference, and there is no model to add it to")
    return as_arrays(decoded(record, start if is_delta else None))


def read_payload(content: bytes, most: int) -> tuple[ArrayRecord, str]:
    """The record that a payload holds, its arrays coded as they are, and the codec.

    A coded one is read only if it is what `to_payload` gives for some model, to the last bit: other
    bytes could hold more than a model. Nothing is decoded before it is known to be no larger than
    `most` bytes, and the whole is no larger either.

    Raises
    ------
    CodecError
        If it is anything else.
    """
    tensors = _tensors(content)
    codec, shapes = _coding(content, tensors)
    size = sum(array.nbytes for name, array in tensors.items() if name not in shapes)
    size += sum(4 * math.prod(shape) for shape in shapes.values())
    if size > most:
        raise CodecError(f"its model has more than the {most:,} bytes allowed")
    record, method = ArrayRecord(), codec_of(codec)[0]
    for name, array in tensors.items():
        if name in shapes:
            packed = array.tobytes()
            record[name] = Array("float32", shapes[name], PREFIX + method, packed)
            _check(name, record[name])
        else:
            record[name] = DecodedArray(array)
            if codec != "float32" and may_be_coded(name, record[name]) and fits(array, method):
                raise CodecError(f"{name} is not coded, but could be")
    if codec != "float32" and _to_bytes(record, codec) != content:
        raise CodecError("it is not written as a coded model is")
    return record, codec


def _check(name: str, array: Array) -> None:
    """Check that a coded array is one that `coded` gives."""
    method, shape = CODECS[array.stype.removeprefix(PREFIX)], tuple(array.shape)
    if not may_be_coded(name, array):
        raise CodecError(f"{name} is coded, but may not be")
    try:
        if not method.is_packed_by_us(array.data, shape):
            raise CodecError("it is not packed as packing does")
        if not np.isfinite(method.unpack(array.data, shape)).all():
            raise CodecError("it holds NaN or infinity")
    except CodecError as error:
        raise CodecError(f"{name}: {error}") from None


def _to_bytes(record: ArrayRecord, codec: str) -> bytes:
    tensors: dict[str, NDArray[Any]] = {}
    shapes = {}
    for name in sorted(record):
        array = record[name]
        if array.stype.startswith(PREFIX):
            shapes[name] = list(array.shape)
            tensors[name] = np.frombuffer(array.data, np.uint8)
        else:
            tensors[name] = np.require(array.numpy(), requirements="C")
    return save(tensors, {_KEY: json.dumps([codec, shapes])})


def _coding(content: bytes, names: Iterable[str]) -> tuple[str, dict[str, tuple[int, ...]]]:
    """Codec and shapes of coded arrays in a payload's metadata; CodecError if they are none."""
    length = int.from_bytes(content[:8], "little")
    try:
        metadata = json.loads(content[8 : 8 + length]).get(_METADATA)
        if metadata is None:
            return "float32", {}
        if len(metadata[_KEY]) > _MAX_ABOUT + sum(12 * len(name) + _MAX_ABOUT for name in names):
            raise CodecError("more metadata than a model has")
        codec, shapes = json.loads(metadata[_KEY])
        ParcelCoding.checked({"codec": codec}, "parcel")
        return codec, {str(name): _shape(shape) for name, shape in shapes.items()}
    except CodecError:
        raise
    except Exception as error:  # hostile bytes make the reader raise all sorts
        raise CodecError(f"not a model ({type(error).__name__})") from None


def _shape(shape: Any) -> tuple[int, ...]:
    if len(shape) > _MAX_DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
        raise CodecError("not a shape")
    return tuple(shape)


def _tensors(content: bytes) -> dict[str, NDArray[Any]]:
    if int.from_bytes(content[:8], "little") > _MAX_HEADER:
        raise CodecError(f"a list of arrays of over {_MAX_HEADER:,} bytes")
    try:
        return load(content)
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise CodecError(f"not a model ({error})") from None
