"""Calls over Unix sockets between processes of an edge on one machine, in bytes.

Who may enter the folder of a socket may call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from flwr_distill.protocol.socket_path import short_path
from flwr_distill.task.errors import ReportedError

_SERVICE = "flwr_distill.Edge"
_MAX_BYTES = 2**31 - 1
"""Bytes of a call or an answer, as Flower's own."""
_OPTIONS = [
    ("grpc.max_send_message_length", _MAX_BYTES),
    ("grpc.max_receive_message_length", _MAX_BYTES),
]
_MAX_REASON = 2000
"""Characters: gRPC sends reasons in headers, which are short."""

Answer = Callable[[bytes, float], bytes]
"""Given a request and the seconds that the caller waits; raises an `EdgeError` to refuse."""


class EdgeError(ReportedError):
    """An edge cannot answer."""


class NobodyThereError(EdgeError):
    """Nobody listens at a socket, or no longer does."""


def listen(socket: Path, answers: Mapping[str, Answer], *, threads: int) -> grpc.Server:
    """Answer calls at a socket, so many at a time; more are refused."""

    def handler(answer: Answer) -> grpc.RpcMethodHandler:
        def handle(request: bytes, context: grpc.ServicerContext) -> bytes:
            try:
                return answer(request, context.time_remaining())
            except EdgeError as error:
                reason = str(error)[:_MAX_REASON]
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
                raise  # abort raises

        return grpc.unary_unary_rpc_method_handler(handle)

    server = grpc.server(
        ThreadPoolExecutor(threads), options=_OPTIONS, maximum_concurrent_rpcs=threads
    )
    handlers = {name: handler(answer) for name, answer in answers.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    with short_path(socket) as path:
        server.add_insecure_port(f"unix:{path}")
        server.start()
    return server


def call(socket: Path, name: str, request: bytes, seconds: float) -> bytes:
    """Call who listens at a socket, and wait so long.

    Raises NobodyThereError if nobody listens there, or ends meanwhile; EdgeError if it refuses, or
    does not answer in time.
    """
    try:
        with (
            short_path(socket) as path,
            grpc.insecure_channel(f"unix:{path}", options=_OPTIONS) as channel,
        ):
            answer: bytes = channel.unary_unary(f"/{_SERVICE}/{name}")(request, timeout=seconds)
    except OSError as error:
        raise NobodyThereError(f"the edge's run below is not there: {error}") from None
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
            raise EdgeError(error.details()) from None
        if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            raise EdgeError(f"the edge did not answer within {seconds:.0f} s") from None
        reason = f"the edge's run below is not there: {error.details()}"
        raise NobodyThereError(reason) from None
    return answer
