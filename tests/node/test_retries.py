"""A SuperLink that has too much to do, or is silent, is asked again; one that refuses is not."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import grpc
import pytest
from flwr.supercore.retry import make_simple_grpc_retry_invoker, wrap_stub

from flwr_distill.flower.line_1_32.calls import limit_absence, limit_calls, overloaded, retry_also

LOCKED = "Exception calling application: (sqlite3.OperationalError) database is locked\n[SQL: ..."


class CallError(grpc.RpcError):
    def __init__(self, code, details):
        self.code, self.details = lambda: code, lambda: details


@pytest.mark.parametrize(
    ("code", "details", "again"),
    [
        (grpc.StatusCode.UNKNOWN, LOCKED, True),
        (grpc.StatusCode.UNKNOWN, "... database or disk is full", True),
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


@pytest.fixture
def silent_superlink():
    """A stub of a gRPC server that does not answer the first call, and the times of its calls."""
    end, calls = threading.Event(), []

    def answer(request, context):
        calls.append(time.monotonic())
        if len(calls) == 1:
            end.wait(20)
        return b"reply"

    handler = grpc.method_handlers_generic_handler(
        "SuperLink", {"Pull": grpc.unary_unary_rpc_method_handler(answer)}
    )
    server = grpc.server(ThreadPoolExecutor(2), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield SimpleNamespace(Pull=channel.unary_unary("/SuperLink/Pull")), calls
    end.set()
    server.stop(None).wait()


def test_a_superlink_that_is_silent_counts_as_away_and_is_asked_again(silent_superlink):
    stub, calls = silent_superlink
    invoker, waits = make_simple_grpc_retry_invoker(), []
    invoker.wait_function = waits.append
    limit_calls(invoker, within=0.5)
    wrap_stub(stub, invoker)
    begin = time.monotonic()
    assert stub.Pull(b"look") == b"reply"
    assert time.monotonic() - begin < 5
    assert (len(calls), len(waits)) == (2, 1)


def test_a_call_with_a_deadline_of_its_own_keeps_it_and_is_not_made_again(silent_superlink):
    """Such as a heartbeat: who sends it knows what its failure means."""
    stub, calls = silent_superlink
    invoker = make_simple_grpc_retry_invoker()
    limit_calls(invoker, within=60)
    wrap_stub(stub, invoker)
    with pytest.raises(grpc.RpcError) as error:
        stub.Pull(b"beat", timeout=0.3)
    assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert len(calls) == 1


def test_a_superlink_that_stays_away_is_given_up_once_for_all_calls(caplog):
    invoker, waits = make_simple_grpc_retry_invoker(), []
    invoker.wait_function = waits.append
    limit_absence(invoker, within=0.2)

    def call():
        time.sleep(0.05)
        raise CallError(grpc.StatusCode.UNAVAILABLE, "down")

    with caplog.at_level("ERROR", "flwr"), pytest.raises(CallError):
        invoker.invoke(call)
    assert len(waits) >= 2
    assert "resume" in caplog.text
    waits.clear()
    with pytest.raises(CallError):
        invoker.invoke(call)
    assert not waits


def test_a_call_that_a_superlink_refuses_shortens_no_other_wait():
    invoker, waits = make_simple_grpc_retry_invoker(), []
    invoker.wait_function = waits.append
    limit_absence(invoker, within=60)
    errors = [CallError(grpc.StatusCode.INTERNAL, ""), CallError(grpc.StatusCode.UNAVAILABLE, "")]

    def call():
        if errors:
            raise errors.pop(0)
        return "reply"

    with pytest.raises(CallError):
        invoker.invoke(call)
    assert invoker.invoke(call) == "reply"
    assert len(waits) == 1
