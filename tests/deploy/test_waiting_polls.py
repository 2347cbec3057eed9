"""A poll for messages waits at the SuperLink until there is one."""

import random
import secrets
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import grpc
import pytest
from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.proto.fleet_pb2_grpc import FleetStub, add_FleetServicer_to_server
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest, SendNodeHeartbeatResponse
from flwr.proto.node_pb2 import Node
from flwr.supercore.grpc import generic_create_grpc_server
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.retry import RetryInvoker, exponential
from flwr.superlink.federation import NoOpFederationManager

from flwr_distill.flower.line_1_32.calls import WAIT
from flwr_distill.flower.line_1_32.fleet.calls import LONGEST, BoundServicer, Doorbell, _seconds
from flwr_distill.flower.line_1_32.fleet.linkstate import (
    MemoryLinkState,
    _server,
    fleet_interceptors,
)
from flwr_distill.flower.line_1_32.node import connection as of_node
from flwr_distill.flower.line_1_32.node.connection import COUNTS, LATE, let_polls_wait
from flwr_distill.flower.line_1_32.objects import MemoryObjectStore
from flwr_distill.node import pace
from flwr_distill.node.pace import MAX_WAIT, Pace
from tests.waiting import wait_until

from .superlinks import factories, message_to, new_node, new_run, opened

SOON, LONG = 5.0, 30.0
"""Seconds within which an answer comes, and for which polls ask to wait."""


class SuperLink:
    """A Fleet API on our state, in a file or in memory, with one node."""

    def __init__(self, file=None):
        if file:
            self.state, self.objects = opened(file)
        else:
            self.objects = MemoryObjectStore()
            self.state = MemoryLinkState(NoOpFederationManager(), self.objects)
        states, stores = factories(self.state, self.objects)
        self.server = _server(
            generic_create_grpc_server,
            fleet_interceptors,
            (BoundServicer(states, stores, False), add_FleetServicer_to_server),
            server_address="127.0.0.1:0",
        )
        self.server.start()
        key = secrets.token_bytes(16)
        self.node, self.run = new_node(self.state, key), new_run(self.state)
        self.state.get_node_id_by_public_key(key)

    @contextmanager
    def stub(self):
        with grpc.insecure_channel(self.server.bound_address) as channel:
            yield FleetStub(channel)

    def poll(self, wait, timeout=None):
        """Answer of a poll, and how long it took."""
        start = time.monotonic()
        request = PullMessagesRequest(node=Node(node_id=self.node))
        with self.stub() as stub:
            response = stub.PullMessages(request, metadata=((WAIT, wait),), timeout=timeout)
        return len(response.messages_list), time.monotonic() - start

    def send(self):
        message = message_to(self.node, self.run)
        self.objects.preregister(self.run, get_object_tree(message))
        assert self.state.store_message_ins(message)


@pytest.fixture(scope="module", params=["SQLite", "memory"])
def superlink(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("superlink")
    superlink = SuperLink(folder / "state.db" if request.param == "SQLite" else None)
    yield superlink
    superlink.server.stop(None).wait(SOON)


def in_thread(call):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(call()), daemon=True)
    thread.start()
    return thread, answers


def waiting(superlink):
    return superlink.state.doorbell._waiting


def test_a_look_that_waits_gets_a_message_as_soon_as_there_is_one(superlink):
    thread, answers = in_thread(lambda: superlink.poll(str(LONG)))
    wait_until(lambda: superlink.node in waiting(superlink), SOON)
    superlink.send()
    thread.join(SOON)
    assert [count for count, _ in answers] == [1]
    assert not waiting(superlink)


def test_a_poll_waits_as_long_as_it_asks_and_not_if_there_is_a_message(superlink):
    count, seconds = superlink.poll("0.3")
    assert count == 0
    assert 0.3 <= seconds < SOON
    superlink.send()
    count, seconds = superlink.poll(str(LONG))
    assert count == 1
    assert seconds < SOON


def test_a_poll_without_a_usable_time_does_not_wait(superlink):
    assert superlink.poll("0")[1] < SOON
    assert [_seconds(wait) for wait in ("0", "-1", "nan", "soon", "inf")] == [0] * 5
    assert _seconds("1e300") == LONGEST


def test_a_nodes_next_look_ends_the_one_before(superlink):
    first, answers = in_thread(lambda: superlink.poll(str(LONG)))
    wait_until(lambda: superlink.node in waiting(superlink), SOON)
    assert superlink.poll("0.1")[0] == 0
    first.join(SOON)
    assert [count for count, _ in answers] == [0]


def test_a_look_whose_node_is_gone_waits_no_more(superlink):
    with pytest.raises(grpc.RpcError) as error:
        superlink.poll(str(LONG), timeout=0.3)
    assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until(lambda: not waiting(superlink), SOON)


def test_as_many_looks_wait_as_there_are_threads_for():
    doorbell = Doorbell(most=2)
    with doorbell.heard_by(1) as first, doorbell.heard_by(2) as second:
        with doorbell.heard_by(3) as third:
            assert third is None
        with doorbell.heard_by(1) as again:
            assert first.is_set()
            assert again is not None
        doorbell.ring(1)
        doorbell.ring(2)
        assert second.is_set()
        with doorbell.heard_by(4) as fourth:
            assert fourth is not None


def test_a_superlink_that_ends_lets_no_look_wait(tmp_path):
    superlink = SuperLink(tmp_path / "state.db")

    def poll():
        with pytest.raises(grpc.RpcError):
            superlink.poll(str(LONG))

    thread, _ = in_thread(poll)
    wait_until(lambda: superlink.node in waiting(superlink), SOON)
    assert superlink.server.stop(0.1).wait(SOON)
    thread.join(SOON)
    assert not thread.is_alive()
    wait_until(lambda: not waiting(superlink), SOON)


class Polls:
    """A node's polls, through an invoker that lets them wait."""

    def __init__(self, call, idle):
        self.pace = Pace(busy=0.05, idle=idle, generator=random.Random(7))
        invoker = RetryInvoker(
            lambda: exponential(0.01, 1, 0.01), grpc.RpcError, max_tries=2, max_time=None
        )
        let_polls_wait(invoker, self.pace)
        self.invoker = invoker
        self.poll = lambda: invoker.invoke(call, request=PullMessagesRequest())
        self.beat = lambda send: invoker.invoke(send, SendNodeHeartbeatRequest(), timeout=SOON)


def test_a_node_looks_again_at_once_after_a_look_that_waited(superlink, monkeypatch):
    monkeypatch.setattr(pace, "MAX_WAIT", 0.4)
    ours = PullMessagesRequest(node=Node(node_id=superlink.node))
    with superlink.stub() as stub:
        polls = Polls(lambda request, **named: stub.PullMessages(ours, **named), 0.4)
        assert not polls.poll().messages_list
    assert polls.pace.draw() == 0


def test_a_node_keeps_its_pace_at_a_superlink_that_does_not_let_it_wait():
    arguments = []
    polls = Polls(lambda **named: arguments.append(named), 20.0)
    polls.poll()
    assert polls.pace.draw() > 0
    (named,) = arguments
    (header,) = named["metadata"]
    assert header[0] == WAIT
    assert 37.5 <= float(header[1]) <= MAX_WAIT
    assert named["timeout"] == pytest.approx(float(header[1]) + LATE, abs=0.01)


def test_a_look_that_may_wait_is_a_heartbeat(superlink):
    def until():
        return superlink.state.get_node_info(node_ids=[superlink.node])[0].online_until

    superlink.state.acknowledge_node_heartbeat(superlink.node, 1.0)
    before = until()
    superlink.poll("0.1")
    assert 60 - SOON < until() - time.time() <= 60
    assert until() > before


def test_heartbeats_are_left_out_while_a_look_stands_for_them(monkeypatch):
    now, moments, sent = [100.0], list[float](), list[bool]()
    monkeypatch.setattr(of_node, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def call(**named):
        start = now[0]
        for moment in moments:
            now[0] = start + moment
            calls = [SendNodeHeartbeatResponse(success=True)]
            assert polls.beat(lambda *_, calls=calls, **__: calls.pop()).success
            sent.append(not calls)

    polls = Polls(call, 20.0)

    def sent_during_a_poll(*seconds):
        moments[:], sent[:] = seconds, []
        polls.poll()
        return sent

    assert sent_during_a_poll(0, MAX_WAIT) == [True, True]  # whether polls wait is not known
    assert sent_during_a_poll(0, COUNTS - 1, COUNTS, MAX_WAIT) == [False, False, True, True]
    assert sent_during_a_poll(0, 1) == [False, False]
    assert sent_during_a_poll(0, 1) == [True, True]  # the last poll did not wait


def test_a_look_that_failed_stands_for_no_heartbeat(monkeypatch):
    class AwayError(grpc.RpcError):
        def code(self):
            return grpc.StatusCode.UNAVAILABLE

    now, sent, answers = [100.0], list[bool](), list[object]()
    monkeypatch.setattr(of_node, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def call(**named):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        now[0] += MAX_WAIT
        return answer

    def beat(_seconds):
        polls.beat(lambda *_, **__: sent.append(True))

    polls = Polls(call, 20.0)
    polls.invoker.wait_function = beat
    answers[:] = ["nothing", AwayError(), "nothing"]
    polls.poll()
    polls.poll()  # its first try fails: before the next one a heartbeat is due
    assert sent == [True]


def test_a_look_that_is_never_answered_is_made_again():
    class LateError(grpc.RpcError):
        def code(self):
            return grpc.StatusCode.DEADLINE_EXCEEDED

    tries = []

    def call(**named):
        tries.append(named)
        if len(tries) == 1:
            raise LateError
        return "nothing"

    assert Polls(call, 20.0).poll() == "nothing"
    assert len(tries) == 2
