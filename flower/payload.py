"""What executor and worker hand each other: a message's objects, and the app's context."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, cast

from flwr.app import Context, Message
from flwr.common.serde import context_from_proto, context_to_proto
from flwr.proto.message_pb2 import Context as ProtoContext
from flwr.supercore.inflatable.inflatable_object import (
    InflatableObject,
    get_all_nested_objects,
    no_object_id_recompute,
)

from flwr_distill.flower.inflating import inflated
from flwr_distill.node.payload import MAX_BYTES, PayloadError

MAX_HEAD = 16 << 20
"""Bytes of a message's list of objects: some 70 for each."""


@dataclass(frozen=True)
class Payload:
    """A message, as Flower encodes it, and a context.

    Parameters
    ----------
    name : str
        The message's id.
    contents : Mapping[str, bytes]
        Its objects by id; of a message that is sent, each is encoded as it is read.
    context : Context
        The app's.
    about : Mapping[str, Any]
        What the worker needs to know besides, as JSON has it.
    """

    name: str
    contents: Mapping[str, bytes]
    context: Context
    about: Mapping[str, Any]

    @classmethod
    def of(cls, message: Message, context: Context) -> Self:
        """Encode a message."""
        name = message.object_id
        with no_object_id_recompute():
            return cls(name, _Encoded(get_all_nested_objects(message)), context, {})

    def replaced(self, message: Message) -> Self:
        """A payload with another message, which has the same id for the app."""
        return replace(self.of(message, self.context), about={**self.about, "message": self.name})

    @property
    def num_bytes(self) -> int:
        """Bytes of the message's objects."""
        return sum(map(len, self.contents.values()))

    def message(self, *, keep: bool = True) -> Message:
        """Decode the message; any error, if a hostile app or server has encoded it.

        Without `keep`, the contents go as they are decoded: large models are in memory once.
        """
        contents = dict(self.contents) if keep else cast(dict[str, bytes], self.contents)
        message = inflated(self.name, contents, MAX_BYTES)
        # An inflated message has no id of its own, which replies need.
        message.metadata.__dict__["_message_id"] = self.about.get("message", self.name)
        return message

    def parts(self) -> Iterator[bytes]:
        """Parts of a `PayloadFile`."""
        yield json.dumps([self.name, [*self.contents], dict(self.about)]).encode()
        yield context_to_proto(self.context).SerializeToString()
        with no_object_id_recompute():  # an object's encoding has the ids of those in it
            yield from self.contents.values()

    @classmethod
    def from_parts(cls, parts: Sequence[bytes]) -> Self:
        """Read the other end's parts; PayloadError if they are no payload."""
        try:
            head, context, *contents = parts
            if len(head) > MAX_HEAD:
                raise PayloadError(f"a head of {len(head):,} bytes, over {MAX_HEAD:,}")
            name, names, about = json.loads(head)
            by_name = dict(zip(names, contents, strict=True))
            if not all(isinstance(each, str) for each in (name, *names)):
                raise PayloadError("an id is no text")
            return cls(name, by_name, context_from_proto(ProtoContext.FromString(context)), about)
        except PayloadError:
            raise
        except Exception as error:  # a hostile app's bytes may raise any
            raise PayloadError(f"no payload ({type(error).__name__})") from error


class _Encoded(Mapping[str, bytes]):
    """A message's objects, each encoded as it is read: never all at once."""

    def __init__(self, objects: Mapping[str, InflatableObject]) -> None:
        self._objects = objects

    def __getitem__(self, name: str) -> bytes:
        return self._objects[name].deflate()

    def __iter__(self) -> Iterator[str]:
        return iter(self._objects)

    def __len__(self) -> int:
        return len(self._objects)
