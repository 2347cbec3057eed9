"""A SuperLink that has too much to do is asked again, one that refuses is not."""

import grpc
import pytest
from flwr.supercore.retry import make_simple_grpc_retry_invoker

from protocol.superlink import overloaded, retry_also

LOCKED = "Exception calling application: (sqlite3.OperationalError) database is locked\n[SQL: ..."


class CallError(grpc.RpcError):
    def __init__(self, code, details):
        self.code, self.details = lambda: code, lambda: details


@pytest.mark.parametrize(
    ("code", "details", "again"),
    [
        (grpc.StatusCode.UNKNOWN, LOCKED, True),
        (grpc.StatusCode.UNKNOWN, "... QueuePool limit of size 5 overflow 10 reached", True),
        (grpc.StatusCode.CANCELLED, "CANCELLED", True),
        (grpc.StatusCode.UNAVAILABLE, "down", True),
        (grpc.StatusCode.UNKNOWN, "Exception calling application: 'x'", False),
        (grpc.StatusCode.UNKNOWN, None, False),
        (grpc.StatusCode.INTERNAL, LOCKED, False),
    ],
)
def test_a_call_is_made_again_when_the_superlink_was_overloaded_or_away(code, details, again):
    invoker = make_simple_grpc_retry_invoker()
    retry_also(invoker, overloaded)
    waits, errors = [], [CallError(code, details)]
    invoker.wait_function = waits.append

    def call():
        if errors:
            raise errors.pop()
        return "reply"

    if again:
        assert invoker.invoke(call) == "reply"
        assert len(waits) == 1
    else:
        with pytest.raises(CallError):
            invoker.invoke(call)
