"""Batches: several of Flower's calls in one, to a SuperLink that accepts them.

A call costs a SuperLink milliseconds, whatever it is for, and a message is a dozen objects with a
call for each. A batch travels as the content of Flower's own PushObject, with a header, so any
SuperLink admits it as it admits each of its calls. One that does not know the header says so at the
first question, and gets Flower's own calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import grpc
from flwr.proto.appio_pb2 import PushAppMessagesRequest, PushAppMessagesResponse
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ConfirmMessageReceivedResponse,
    PullObjectRequest,
    PullObjectResponse,
    PushObjectRequest,
    PushObjectResponse,
)
from flwr.proto.node_pb2 import Node

HEADER = ("flwr-distill-together", "1")
"""Header of a batch, and of the question whether a SuperLink accepts batches."""
MOST_CALLS = 500
"""Calls in a batch."""
MOST_BYTES = 2**22
"""Bytes in a batch of several calls; a single call may have more."""
_LENGTH = 8
"""Bytes of the length before each part."""
_KINDS: dict[type[Any], tuple[str, Any]] = {
    PushMessagesRequest: ("PushMessages", PushMessagesResponse),
    PushAppMessagesRequest: ("PushMessages", PushAppMessagesResponse),
    PushObjectRequest: ("PushObject", PushObjectResponse),
    PullObjectRequest: ("PullObject", PullObjectResponse),
    ConfirmMessageReceivedRequest: ("ConfirmMessageReceived", ConfirmMessageReceivedResponse),
}
"""Name and answer of the calls that can be in a batch, by request."""
NAMES = {name for name, _ in _KINDS.values()}


class Together:
    """Makes calls in batches where the SuperLink accepts them.

    `stub` is Flower's, for the `service` ``Fleet`` or ``ServerAppIo``. `invoke` calls a function
    until the SuperLink answers; the stub's calls must then do so themselves.
    """

    def __init__(
        self,
        stub: Any,
        channel: grpc.Channel,
        service: str,
        invoke: Callable[..., Any] | None = None,
    ) -> None:
        self._stub = stub
        self._ask, self._post = (
            channel.unary_unary(
                f"/flwr.proto.{service}/{name}",
                request_serializer=kind.SerializeToString,
                response_deserializer=PullObjectResponse.FromString,
            )
            for name, kind in (("PullObject", PullObjectRequest), ("PushObject", PushObjectRequest))
        )
        if invoke is not None:
            self._ask, self._post = partial(invoke, self._ask), partial(invoke, self._post)
        self._taken: bool | None = None

    def taken(self, node: Node, run_id: int, **named: Any) -> bool:
        """Whether the SuperLink accepts batches; asks it once."""
        if self._taken is None:
            request = PullObjectRequest(node=node, run_id=run_id)
            self._taken = self._ask(request, metadata=(HEADER,), **named).object_found
        return self._taken

    def make(self, node: Node, run_id: int, requests: Sequence[Any], **named: Any) -> list[Any]:
        """Make calls; return the answers to the first of them, at least one.

        The caller must repeat the others: all but one where the SuperLink accepts no batches, else
        those beyond the bounds of a batch or of its answer. `named` is for gRPC, such as
        ``timeout``. Raises ValueError if the SuperLink's answer is malformed.
        """
        few = list(_first_batch(requests))
        if len(few) > 1 and self.taken(node, run_id, **named):
            parts = []
            for request in few:
                name, _ = _KINDS[type(request)]
                parts += [name.encode(), request.SerializeToString()]
            envelope = PushObjectRequest(node=node, run_id=run_id, object_content=packed(parts))
            response = self._post(envelope, metadata=(HEADER,), **named)
            if response.object_found:
                answers = unpacked(response.object_content, len(few))
                if not answers:
                    raise ValueError("the SuperLink answers no call of a batch")
                return [
                    _KINDS[type(request)][1].FromString(answer)
                    for request, answer in zip(few, answers, strict=False)
                ]
            self._taken = False  # another SuperLink has replaced it
        name, _ = _KINDS[type(requests[0])]
        return [getattr(self._stub, name)(requests[0], **named)]

    def make_all(self, node: Node, run_id: int, requests: Sequence[Any], **named: Any) -> list[Any]:
        """Make calls, in as few batches as possible; return all answers."""
        answers: list[Any] = []
        while len(answers) < len(requests):
            answers += self.make(node, run_id, requests[len(answers) :], **named)
        return answers


def _first_batch(requests: Sequence[Any]) -> Iterator[Any]:
    left = MOST_BYTES
    for request in requests[:MOST_CALLS]:
        size = request.ByteSize()
        if size > left and left < MOST_BYTES:
            return
        left -= size
        yield request


def packed(parts: Iterable[bytes]) -> bytes:
    """Join byte strings, each behind its length."""
    return b"".join(len(part).to_bytes(_LENGTH) + part for part in parts)


def unpacked(data: bytes, most: int) -> list[bytes]:
    """Split what `packed` has joined; ValueError if it is malformed or has over `most` parts."""
    parts: list[bytes] = []
    start = 0
    while start < len(data):
        begin = start + _LENGTH
        length = int.from_bytes(data[start:begin])
        start = begin + length
        if start > len(data) or len(parts) == most:
            raise ValueError("a batch of calls has too many parts, or is cut off")
        parts.append(data[begin:start])
    return parts
