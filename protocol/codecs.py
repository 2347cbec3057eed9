"""Codecs of single arrays: fewer bits for a model's weights, or for what training changed in them.

They know nothing of messages. Sources: stochastic rounding, Alistarh et al., "QSGD" (2017), with
one scale a channel; the largest values alone, with what was left out added the next time, Stich et
al., "Sparsified SGD with Memory" (2018). Packing is Zstandard's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

Values = NDArray[np.float32]
Raw = NDArray[Any]

EXACT = "exact"
"""Codec that packs values without loss; no value of a run's settings."""
TOP_SHARE = 0.3
"""Share of an array's values that ``topk`` sends."""
TOP_LEVELS = 7
"""Levels of these, besides their signs."""
LEVEL = 3
"""Of Zstandard: its default."""


class CodecError(ValueError):
    """Bytes that are no array in this codec."""


@dataclass(frozen=True)
class Codec:
    """How float32 values become bytes, and back.

    Parameters
    ----------
    encode : callable
        Values and a generator for random rounding; gives the parts of the encoding.
    parts : callable
        Types and sizes of these parts for an array's shape.
    decode : callable
        Parts and the shape; gives the values.
    unbiased : bool (default: True)
        Whether values are kept on average; if not, what is left out must be sent later.
    largest : float (default: 3e38)
        The largest value, by amount, that is kept.
    """

    encode: Callable[[Values, np.random.Generator], list[Raw]]
    parts: Callable[[tuple[int, ...]], list[tuple[str, int]]]
    decode: Callable[[list[Raw], tuple[int, ...]], Values]
    unbiased: bool = True
    largest: float = 3e38

    def pack(self, values: Values, rng: np.random.Generator) -> bytes:
        """Encode and pack finite values."""
        raw = b"".join(_planes(part) for part in self.encode(values, rng))
        # A copy: what zstandard returns keeps the memory that it took for the worst case.
        return bytes(memoryview(zstandard.compress(raw, LEVEL)))

    def unpack(self, packed: bytes, shape: tuple[int, ...]) -> Values:
        """Decode the bytes of an array of this shape.

        Raises CodecError if they are none. Nothing larger than the shape asks for is unpacked.
        """
        raw, parts, start = self._raw(packed, shape), [], 0
        for kind, count in self._kinds(shape):
            end = start + kind.itemsize * count
            parts.append(_from_planes(raw[start:end], kind, count))
            start = end
        return self.decode(parts, shape)

    def is_packed_by_us(self, packed: bytes, shape: tuple[int, ...]) -> bool:
        """Whether packing again gives the same bytes: others could have more in them.

        So it is of one version of Zstandard alone. CodecError as of `unpack`.
        """
        return zstandard.compress(self._raw(packed, shape), LEVEL) == packed

    def _kinds(self, shape: tuple[int, ...]) -> list[tuple[np.dtype[Any], int]]:
        return [(np.dtype(kind), count) for kind, count in self.parts(shape)]

    def _raw(self, packed: bytes, shape: tuple[int, ...]) -> bytes:
        size = sum(kind.itemsize * count for kind, count in self._kinds(shape))
        try:
            if zstandard.frame_content_size(packed) != size:
                raise CodecError(f"it does not unpack to the {size:,} bytes of its shape")
            return zstandard.decompress(packed, max_output_size=size)
        except zstandard.ZstdError as error:
            raise CodecError(f"it cannot be unpacked ({error})") from None


def _planes(part: Raw) -> bytes:
    """All first bytes, then all second ones: equal bytes stand together, and pack better."""
    whole = np.ascontiguousarray(part).reshape(-1)
    return whole.view(np.uint8).reshape(whole.size, whole.itemsize).T.tobytes()


def _from_planes(raw: bytes, kind: np.dtype[Any], count: int) -> Raw:
    planes = np.frombuffer(raw, np.uint8).reshape(kind.itemsize, count)
    return np.ascontiguousarray(planes.T).view(kind).reshape(count)


def _size(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


def _exact() -> Codec:
    return Codec(
        encode=lambda values, rng: [values.astype("<f4")],
        parts=lambda shape: [("<f4", _size(shape))],
        decode=lambda parts, shape: parts[0].astype(np.float32).reshape(shape),
    )


def _float16() -> Codec:
    return Codec(
        encode=lambda values, rng: [np.clip(values, -65504, 65504).astype("<f2")],
        parts=lambda shape: [("<f2", _size(shape))],
        decode=lambda parts, shape: parts[0].astype(np.float32).reshape(shape),
        largest=65504,
    )


def _bfloat16() -> Codec:
    def encode(values: Values, rng: np.random.Generator) -> list[Raw]:
        bits = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)
        to_even = 0x7FFF + (bits >> 16 & 1)
        return [(bits + to_even >> 16).astype("<u2")]

    def decode(parts: list[Raw], shape: tuple[int, ...]) -> Values:
        return (parts[0].astype(np.uint32) << 16).view(np.float32).reshape(shape)

    return Codec(encode, lambda shape: [("<u2", _size(shape))], decode)


def _integer(most: int) -> Codec:
    """Integers from ``-most`` to ``most``, with a scale for each channel: the first axis."""

    def rows_of(shape: tuple[int, ...]) -> tuple[int, int]:
        return (shape[0], _size(shape[1:])) if len(shape) > 1 else (1, _size(shape))

    def encode(values: Values, rng: np.random.Generator) -> list[Raw]:
        scales, steps = _in_steps(values.reshape(rows_of(values.shape)), most)
        steps += rng.random(steps.shape, np.float32)
        return [scales, _in_bytes(np.clip(np.floor(steps), -most, most), most)]

    def parts(shape: tuple[int, ...]) -> list[tuple[str, int]]:
        return [("<f4", rows_of(shape)[0]), _bytes_of(_size(shape), most)]

    def decode(parts: list[Raw], shape: tuple[int, ...]) -> Values:
        scales, steps = parts[0], _from_bytes(parts[1], _size(shape), most)
        return _from_steps(scales, steps.reshape(rows_of(shape)), most).reshape(shape)

    return Codec(encode, parts, decode)


def _are_pairs(most: int) -> bool:
    """Whether two integers up to `most` fit in a byte: Zstandard makes less of such pairs."""
    return (2 * most + 1) ** 2 <= 256


def _bytes_of(count: int, most: int) -> tuple[str, int]:
    return ("u1", (count + 1) // 2) if _are_pairs(most) else ("i1", count)


def _in_bytes(steps: Values, most: int) -> Raw:
    whole = steps.reshape(-1).astype(np.int8)
    if not _are_pairs(most):
        return whole
    digits = (np.append(whole, np.zeros(whole.size % 2, np.int8)) + most).astype(np.uint8)
    return digits[::2] * np.uint8(2 * most + 1) + digits[1::2]


def _from_bytes(part: Raw, count: int, most: int) -> Raw:
    if not _are_pairs(most):
        return part
    digits = np.stack(np.divmod(part, np.uint8(2 * most + 1)), axis=1).reshape(-1)
    if (digits[count:] != most).any():
        raise CodecError("it has more values than its shape")
    return digits[:count].astype(np.int8) - np.int8(most)


def _in_steps(rows: Values, most: int) -> tuple[Values, Values]:
    """A scale for each row, (rows, 1), and the values in units of it, up to ``most`` in amount."""
    scales = np.abs(rows).max(axis=1, initial=0, keepdims=True) / np.float32(most)
    steps = np.divide(rows, scales, out=np.zeros_like(rows), where=scales > 0)
    return scales.astype("<f4"), steps


def _from_steps(scales: Raw, steps: Raw, most: int) -> Values:
    if not (np.isfinite(scales) & ~np.signbit(scales)).all():
        raise CodecError("a scale is no finite number from 0 up")
    if steps.size and not -most <= steps.min() <= steps.max() <= most:
        raise CodecError(f"it has steps beyond {most}")
    rows = steps.astype(np.float32)
    if rows[scales == 0].any():
        raise CodecError("it has steps of a scale of 0")
    return rows * scales[:, None]


def _top(share: float, most: int) -> Codec:
    """The share of values that are largest by amount, as integers up to ``most``, and their places.

    What a finer scale would keep is sent later, with what is left out. Places are a bit a value.
    """

    def count(shape: tuple[int, ...]) -> int:
        return math.ceil(share * _size(shape))

    def encode(values: Values, rng: np.random.Generator) -> list[Raw]:
        flat, number = values.reshape(-1), count(values.shape)
        is_sent = np.zeros(flat.size, bool)
        is_sent[np.argpartition(np.abs(flat), -number)[-number:]] = True
        scale, steps = _in_steps(flat[None, is_sent], most)
        return [
            scale,
            np.packbits(is_sent),
            _in_bytes(np.clip(np.rint(steps), -most, most), most),
        ]

    def parts(shape: tuple[int, ...]) -> list[tuple[str, int]]:
        return [("<f4", 1), ("u1", math.ceil(_size(shape) / 8)), _bytes_of(count(shape), most)]

    def decode(parts: list[Raw], shape: tuple[int, ...]) -> Values:
        scale, bits, steps = parts
        is_sent = np.unpackbits(bits).astype(bool)
        if is_sent.sum() != count(shape) or is_sent[_size(shape) :].any():
            raise CodecError("it has values beyond its shape, or another number of them")
        flat = np.zeros(_size(shape), np.float32)
        values = _from_steps(scale, _from_bytes(steps, count(shape), most)[None], most)
        flat[is_sent[: _size(shape)]] = values[0]
        return flat.reshape(shape)

    return Codec(encode, parts, decode, unbiased=False)


CODECS = {
    EXACT: _exact(),
    "float16": _float16(),
    "bfloat16": _bfloat16(),
    "int8": _integer(127),
    "int4": _integer(7),
    "topk": _top(TOP_SHARE, TOP_LEVELS),
}
"""By name; ``float32`` is no codec: arrays as Flower sends them."""
