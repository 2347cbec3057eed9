"""A message out of its objects: no more bytes than agreed, and each in memory once.

An array may name a chunk any number of times, so that a megabyte becomes a terabyte.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.supercore.constant import HEAD_BODY_DIVIDER, HEAD_VALUE_DIVIDER
from flwr.supercore.inflatable.inflatable_object import (
    InflatableObject,
    get_object_body,
    get_object_children_ids_from_object_content,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

MAX_LIST = 1 << 20
"""Bytes of an array's list of chunks."""
MAX_LISTS = 4 << 20
"""Bytes of all lists in a message, of chunks, arrays and records: JSON, which takes some 25 times
as much once it is read."""
LISTS = (Array.__name__, ArrayRecord.__name__, RecordDict.__name__)
CHUNK = "ArrayChunk"
MAX_KIND = 20
"""Bytes of an object's type."""


class InflationError(ValueError):
    """A message's arrays would have too many bytes."""


def inflated(name: str, contents: dict[str, bytes], most: int) -> Message:
    """Decode a message; its contents are removed as they are decoded.

    Parameters
    ----------
    name : str
        The message's id.
    contents : dict[str, bytes]
        Its objects by id.
    most : int
        Bytes that its arrays may have in all.

    Raises
    ------
    InflationError
        If they would have more. Malformed contents may raise any other error.
    """
    kinds = {name: _kind(content) for name, content in contents.items()}
    if sum(len(contents[name]) for name, kind in kinds.items() if kind in LISTS) > MAX_LISTS:
        raise InflationError(f"lists of over {MAX_LISTS:,} bytes")
    arrays = {
        name: about_array(contents[name]) for name, kind in kinds.items() if kind == Array.__name__
    }
    if sum(len(contents[chunk]) for _, chunks in arrays.values() for chunk in chunks) > most:
        raise InflationError(f"arrays of over {most:,} bytes")
    uses = Counter(chunk for _, chunks in arrays.values() for chunk in {*chunks})
    objects: dict[str, InflatableObject] = {}
    for array, (about, chunks) in arrays.items():
        del contents[array]
        objects[array] = _array(about, chunks, contents)
        for chunk in {*chunks}:
            uses[chunk] -= 1
            if not uses[chunk]:
                del contents[chunk]
    return cast(Message, inflate_object_from_contents(name, contents, objects=objects))


def about_array(content: bytes) -> tuple[dict[str, Any], list[str]]:
    """What an array's object says of it, and its chunks; InflationError if these are too many."""
    if len(content) > MAX_LIST:
        raise InflationError(f"an array with a list of over {MAX_LIST:,} bytes")
    chunks = get_object_children_ids_from_object_content(content)
    about = json.loads(get_object_body(content, Array))
    return about, [chunks[place] for place in about["arraychunk_ids"]]


def _array(about: dict[str, Any], chunks: list[str], contents: Mapping[str, bytes]) -> Array:
    bodies = {chunk: _body(contents[chunk]) for chunk in chunks}
    data = b"".join(bodies[chunk] for chunk in chunks)
    return Array(about["dtype"], tuple(about["shape"]), about["stype"], data)


def _kind(content: bytes) -> str:
    """Type of an object, by the first bytes of its content: a whole head may be long."""
    return content[:MAX_KIND].partition(HEAD_VALUE_DIVIDER.encode())[0].decode()


def _body(content: bytes) -> memoryview:
    if (kind := _kind(content)) != CHUNK:
        raise ValueError(f"an array has a {kind} for a chunk")
    return memoryview(content)[content.index(HEAD_BODY_DIVIDER) + len(HEAD_BODY_DIVIDER) :]
