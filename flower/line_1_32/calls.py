"""Calls to a SuperLink: in batches where it accepts them, and retried where it is away.

A call costs a SuperLink milliseconds, whatever it is for, and a message is a dozen objects with a
call for each. A batch travels as the content of Flower's own PushObject, with a header, so any
SuperLink admits it as it admits each of its calls. One that does not know the header says so at the
first question, and gets Flower's own calls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from logging import ERROR, WARNING
from typing import TYPE_CHECKING, Any

import grpc
from flwr.common import log
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

if TYPE_CHECKING:
    from flwr.supercore.retry import RetryInvoker
    from flwr.supercore.retry.retry_invoker import RetryState


HEADER = ("flwr-distill-together", "1")
"""Header of a batch, and of the question whether a SuperLink accepts batches."""
MAX_CALLS = 500
"""Calls in a batch."""
MAX_BYTES = 2**22
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


class Batches:
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
    left = MAX_BYTES
    for request in requests[:MAX_CALLS]:
        size = request.ByteSize()
        if size > left and left < MAX_BYTES:
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


WAIT = "flwr-distill-wait"
"""Header of a node's poll for messages: seconds for which it may wait at the SuperLink.

Ours answers once there is a message, or after these seconds, and counts the poll as a heartbeat;
any other answers at once.
"""
_DATABASE = ("database is locked", "database or disk is full", "QueuePool limit")
"""Errors that pass: others wait 5 s for SQLite's one writer, and 30 s for one of SQLAlchemy's 15
connections; a full disk may be cleared. Flower passes them on."""


def overloaded(error: grpc.RpcError) -> bool:
    """Whether a call failed because the SuperLink was too busy, and may be retried.

    gRPC cancels a call that no thread has taken within 30 s.
    """
    code = error.code()
    return code == grpc.StatusCode.CANCELLED or (
        code == grpc.StatusCode.UNKNOWN
        and any(text in (error.details() or "") for text in _DATABASE)
    )


def retry_also(invoker: RetryInvoker, passes: Callable[[grpc.RpcError], bool]) -> None:
    """Have an invoker retry also after errors for which `passes` is true."""
    gives_up = invoker.should_giveup

    def should_give_up(error: Exception) -> bool:
        passing = isinstance(error, grpc.RpcError) and passes(error)
        return not passing and gives_up is not None and gives_up(error)

    invoker.should_giveup = should_give_up


class Outage:
    """Logs once that a SuperLink does not answer, with a remedy, and once that it answers again.

    Any thread may report; an invoker does if the outage watches it.
    """

    def __init__(self, superlink: str, remedy: str) -> None:
        self._superlink = superlink
        self._remedy = remedy
        self._lock = threading.Lock()
        self._since: float | None = None

    def begin(self) -> None:
        """No answer came."""
        with self._lock:
            if self._since is not None:
                return
            self._since = time.monotonic()
        log(WARNING, "%s does not answer: %s", self._superlink, self._remedy)

    def end(self) -> None:
        """An answer came."""
        with self._lock:
            since, self._since = self._since, None
        if since is not None:
            seconds = time.monotonic() - since
            log(WARNING, "%s answers again, after %.0f s", self._superlink, seconds)

    def watch(self, invoker: RetryInvoker) -> None:
        """Have an invoker report: its calls fail while the SuperLink is away."""
        backs_off, succeeds = invoker.on_backoff, invoker.on_success

        def back_off(state: RetryState) -> None:
            self.begin()
            if backs_off is not None:
                backs_off(state)

        def succeed(state: RetryState) -> None:
            self.end()
            if succeeds is not None:
                succeeds(state)

        invoker.on_backoff, invoker.on_success = back_off, succeed


def limit_calls(invoker: RetryInvoker, within: float) -> None:
    """Give an invoker's calls so many seconds, after which the SuperLink counts as away.

    Flower's calls have no deadline, except heartbeats: a call whose answer is lost, as when the
    SuperLink's machine loses power, would never end. It is retried, as after any lost connection.
    """
    invoke = invoker.invoke

    def invoke_within(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if "timeout" not in kwargs:
            target, kwargs = answered(target), {**kwargs, "timeout": within}
        return invoke(target, *args, **kwargs)

    invoker.invoke = invoke_within  # type: ignore[method-assign]


def limit_absence(invoker: RetryInvoker, within: float) -> None:
    """Let an invoker's calls fail once the SuperLink has been away for so many seconds.

    Flower waits for ever. After the first such failure, no other call waits again.
    """
    gives_up = invoker.on_giveup

    def give_up(state: RetryState) -> None:
        error = state.exception
        away = isinstance(error, grpc.RpcError) and error.code() == grpc.StatusCode.UNAVAILABLE
        if away and invoker.max_time and state.elapsed_time >= invoker.max_time:
            log(
                ERROR,
                "The SuperLink has been away for %.0f minutes: this run ends. Its last checkpoint "
                'is kept; once the SuperLink is back, resume it by resume="latest"',
                invoker.max_time / 60,
            )
            invoker.max_time = 0.0
        if gives_up is not None:
            gives_up(state)

    invoker.max_time, invoker.on_giveup = within, give_up


def answered(target: Callable[..., Any]) -> Callable[..., Any]:
    """A call whose SuperLink counts as away if it does not answer within the `timeout`."""

    def call(*args: Any, timeout: float, **kwargs: Any) -> Any:
        try:
            return target(*args, timeout=timeout, **kwargs)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise NoAnswerError(timeout) from error
            raise

    return call


class NoAnswerError(grpc.RpcError):
    """A call was not answered in time: its code is that of a SuperLink that is away."""

    def __init__(self, within: float) -> None:
        super().__init__(f"no answer in {within:.0f} s")

    def code(self) -> grpc.StatusCode:
        """UNAVAILABLE, after which Flower waits and retries."""
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        """Text of the error."""
        return str(self)
