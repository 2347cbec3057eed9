"""Serves a batch of a node's or a ServerApp's calls, in one call and one transaction."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import grpc
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse, PushObjectRequest
from google.protobuf.message import DecodeError

from flwr_distill.flower.line_1_32.together import (
    HEADER,
    MOST_BYTES,
    MOST_CALLS,
    NAMES,
    packed,
    unpacked,
)


class CallsTogether(grpc.ServerInterceptor):
    """Serves batches of calls; comes after the interceptors that admit the caller.

    Each call goes through Flower's own handler, with all its checks, in the name of the node that
    sends the batch. They are stored together or, if one is refused, not at all.

    `add` adds Flower's servicer of the API to a server. `transaction` opens a transaction, in which
    the handlers of a batch read and write.
    """

    def __init__(
        self,
        servicer: Any,
        add: Callable[[Any, Any], None],
        transaction: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        handlers = _Handlers()
        add(servicer, handlers)
        self._handlers = handlers.by_name
        self._transaction = transaction

    def intercept_service(
        self,
        continuation: Callable[[Any], Any],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Answer calls with the header in place of Flower."""
        handler = continuation(handler_call_details)
        if HEADER not in [tuple(each) for each in handler_call_details.invocation_metadata]:
            return handler
        _, _, name = handler_call_details.method.rpartition("/")
        if name == "PullObject":
            return _handler(_accept, PullObjectRequest)
        return _handler(self._make, PushObjectRequest) if name == "PushObject" else handler

    def _make(self, request: Any, context: grpc.ServicerContext) -> PullObjectResponse:
        try:
            parts = unpacked(request.object_content, 2 * MOST_CALLS)
        except ValueError as error:
            _reject(context, str(error))
        if len(parts) % 2:
            _reject(context, "a call in the batch has no content")
        calls = zip(parts[::2], parts[1::2], strict=True)
        answers: list[bytes] = []
        left = MOST_BYTES
        with self._transaction():
            for name, content in calls:
                answers.append(self._answer(name, content, request.node.node_id, context))
                left -= len(answers[-1])
                if left < 0:
                    break
        return PullObjectResponse(object_found=True, object_content=packed(answers))

    def _answer(
        self, name: bytes, content: bytes, node_id: int, context: grpc.ServicerContext
    ) -> bytes:
        handler = self._handlers.get(name.decode("ascii", "replace"))
        if handler is None:
            _reject(context, "a call in the batch is of another kind")
        try:
            request = handler.request_deserializer(content)
        except DecodeError:
            _reject(context, "a call in the batch cannot be read")
        if hasattr(request, "node") and request.node.node_id != node_id:
            _reject(context, "a call in the batch is another node's")
        try:
            answer = handler.unary_unary(request, context)
        except (KeyError, ValueError) as error:
            _reject(context, f"Flower refuses a call in the batch: {type(error).__name__}")
        written: bytes = handler.response_serializer(answer)
        return written


class _Handlers:
    """Stands in for a server, to collect its handlers of calls that can be in a batch."""

    def __init__(self) -> None:
        self.by_name: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Do nothing: the registered ones are the same."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """Collect the handlers of a service."""
        self.by_name |= {name: handlers[name] for name in NAMES}


def _handler(answer: Callable[..., Any], kind: Any) -> grpc.RpcMethodHandler:
    return grpc.unary_unary_rpc_method_handler(
        answer,
        request_deserializer=kind.FromString,
        response_serializer=PullObjectResponse.SerializeToString,
    )


def _accept(request: PullObjectRequest, context: grpc.ServicerContext) -> PullObjectResponse:
    return PullObjectResponse(object_found=True)


def _reject(context: grpc.ServicerContext, reason: str) -> NoReturn:
    context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)
    raise AssertionError("abort raises")
