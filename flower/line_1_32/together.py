"""Several of Flower's calls in one, to a SuperLink that takes them.

A call costs a SuperLink milliseconds, whatever it asks for, and a message is a dozen objects with a
call for each. Calls that go together travel as the content of Flower's own PushObject, with a
header. So any SuperLink admits them as it admits each of them; one that does not know the header
says so at the first question, and is asked in Flower's own way.
"""

from __future__ import annotations

import struct
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
"""Of a call that holds others, and of the question whether a SuperLink takes such."""
MOST_CALLS = 500
"""Calls that go together."""
MOST_BYTES = 2**22
"""Bytes that go together, but for those of a single call, which may be any number."""
_LENGTH = struct.Struct(">Q")
_KINDS: dict[type[Any], tuple[str, Any]] = {
    PushMessagesRequest: ("PushMessages", PushMessagesResponse),
    PushAppMessagesRequest: ("PushMessages", PushAppMessagesResponse),
    PushObjectRequest: ("PushObject", PushObjectResponse),
    PullObjectRequest: ("PullObject", PullObjectResponse),
    ConfirmMessageReceivedRequest: ("ConfirmMessageReceived", ConfirmMessageReceivedResponse),
}
"""Name and answer of the calls that can go together, by request."""
NAMES = {name for name, _ in _KINDS.values()}


class Together:
    """Makes calls together where the SuperLink takes them so.

    Parameters
    ----------
    stub : object
        Flower's own, over the channel.
    channel : grpc.Channel
        To the SuperLink.
    service : str
        Of the stub: ``Fleet`` or ``ServerAppIo``.
    invoke : callable, optional (default: None)
        Calls a function until the SuperLink answers, as the stub does already where it is given.
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
        """Whether the SuperLink takes calls together; asks it once."""
        if self._taken is None:
            request = PullObjectRequest(node=node, run_id=run_id)
            self._taken = self._ask(request, metadata=(HEADER,), **named).object_found
        return self._taken

    def make(self, node: Node, run_id: int, requests: Sequence[Any], **named: Any) -> list[Any]:
        """Make calls; return the answers to the first of them: one at least.

        The caller makes the rest again. That is all but one where the SuperLink does not take them
        together, and those whose answers are too many bytes in one.

        Parameters
        ----------
        node : Node
            Who calls.
        run_id : int
            The run.
        requests : sequence
            Of Flower's calls, of the kinds that can go together.
        named
            For gRPC, such as ``timeout`` in seconds.

        Raises
        ------
        ValueError
            If the SuperLink's answer is none.
        """
        few = list(_few(requests))
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
                    raise ValueError("the SuperLink answers none of several calls")
                return [
                    _KINDS[type(request)][1].FromString(answer)
                    for request, answer in zip(few, answers, strict=False)
                ]
            self._taken = False  # another SuperLink is in its place
        name, _ = _KINDS[type(requests[0])]
        return [getattr(self._stub, name)(requests[0], **named)]

    def make_all(self, node: Node, run_id: int, requests: Sequence[Any], **named: Any) -> list[Any]:
        """Make calls, in as few as possible; return all answers."""
        answers: list[Any] = []
        while len(answers) < len(requests):
            answers += self.make(node, run_id, requests[len(answers) :], **named)
        return answers


def _few(requests: Sequence[Any]) -> Iterator[Any]:
    """The first requests, as many as go together."""
    left = MOST_BYTES
    for request in requests[:MOST_CALLS]:
        size = request.ByteSize()
        if size > left and left < MOST_BYTES:
            return
        left -= size
        yield request


def packed(parts: Iterable[bytes]) -> bytes:
    """Put byte strings into one, each behind its length."""
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def unpacked(data: bytes, most: int) -> list[bytes]:
    """Take byte strings out of one.

    Raises
    ------
    ValueError
        If it is not as `packed` writes it, or holds more than `most`.
    """
    parts: list[bytes] = []
    start = 0
    while start < len(data):
        end = start + _LENGTH.size
        if end > len(data) or len(parts) == most:
            raise ValueError("calls that go together are too many, or cut off")
        (length,) = _LENGTH.unpack(data[start:end])
        start = end + length
        if start > len(data):
            raise ValueError("calls that go together are too many, or cut off")
        parts.append(data[end:start])
    return parts
