"""Calls that go together: as each of them alone, with all checks, and stored all or none."""

import threading
from contextlib import contextmanager
from itertools import count

import grpc
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.client.grpc_rere_client.node_auth_client_interceptor import NodeAuthClientInterceptor
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.fleet_pb2_grpc import FleetStub, add_FleetServicer_to_server
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.proto.node_pb2 import Node
from flwr.proto.serverappio_pb2_grpc import (
    ServerAppIoStub,
    add_ServerAppIoServicer_to_server,
)
from flwr.server.superlink.fleet.grpc_rere.fleet_servicer import FleetServicer
from flwr.server.superlink.fleet.grpc_rere.node_auth_server_interceptor import (
    NodeAuthServerInterceptor,
)
from flwr.supercore.grpc import generic_create_grpc_server
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.interceptors import (
    AppIoTokenClientInterceptor,
    create_serverappio_token_auth_server_interceptor,
)
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.superlink.servicer.serverappio.serverappio_servicer import ServerAppIoServicer
from hypothesis import given
from hypothesis import strategies as st

from flwr_distill.flower.line_1_32 import calls as protocol
from flwr_distill.flower.line_1_32.calls import HEADER, MAX_CALLS, Batches, packed, unpacked
from flwr_distill.flower.line_1_32.fleet.calls import BoundServicer
from flwr_distill.flower.line_1_32.fleet.linkstate import (
    _server,
    app_interceptors,
    fleet_interceptors,
)
from flwr_distill.flower.line_1_32.node.connection import BatchingStub

from .superlinks import factories, message_to, new_node, new_run, opened

SOON = 10.0


class SuperLink:
    """The Fleet and ServerAppIo APIs, which know who calls, with two nodes and a run."""

    def __init__(self, folder, ours=True):
        self.file = folder / "state.db"
        self.state, self.store = opened(self.file)
        self.calls, self._starts = [], count(step=100)
        states, stores = factories(self.state, self.store)

        def server(servicer, add, admits, interceptors):
            make = generic_create_grpc_server
            admitting = [Counting(self.calls), admits]
            arguments = {"server_address": "127.0.0.1:0", "interceptors": admitting}
            if ours:
                started = _server(make, interceptors, (servicer, add), **arguments)
            else:
                started = make((servicer, add), **arguments)
            started.start()
            return started

        self.fleet = server(
            (BoundServicer if ours else FleetServicer)(states, stores, True),
            add_FleetServicer_to_server,
            NodeAuthServerInterceptor(states),
            fleet_interceptors,
        )
        self.app = server(
            ServerAppIoServicer(states, stores),
            add_ServerAppIoServicer_to_server,
            create_serverappio_token_auth_server_interceptor(states.state),
            app_interceptors,
        )
        self.keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
        public = [public_key_to_bytes(key.public_key()) for key in self.keys]
        self.nodes = [Node(node_id=new_node(self.state, key)) for key in public]
        self.run = self.start_run()

    def start_run(self):
        run = new_run(self.state)
        self.task = self.state.get_run_info(run_ids=[run])[0].primary_task_id
        self.token = self.state.claim_task(self.task)
        self.state.activate_task(self.task)
        return run

    @contextmanager
    def channel(self, key=None, token=None):
        """A channel to the Fleet API with a node's key, or to the other with a token."""
        address = self.fleet.bound_address if key else self.app.bound_address
        with grpc.insecure_channel(address) as channel:
            if key:
                signing = NodeAuthClientInterceptor(key, key.public_key())
                yield grpc.intercept_channel(channel, signing)
            elif token:
                yield grpc.intercept_channel(channel, AppIoTokenClientInterceptor(token))
            else:
                yield channel

    def send(self, place, size=3):
        """Store a message for a node, without its objects' contents; return it.

        No two are alike, and those of before are gone.
        """
        self.state.query("DELETE FROM message_ins")
        start = next(self._starts)
        arrays = ArrayRecord([np.arange(1000.0) + start + number for number in range(size)])
        content = RecordDict({"arrays": arrays})
        message = message_to(self.nodes[place].node_id, self.run, content)
        self.store.preregister(self.run, get_object_tree(message))
        assert self.state.store_message_ins(message)
        return message

    def fetch(self, place):
        """Note that a node has fetched its message."""
        assert self.state.get_message_ins(self.nodes[place].node_id, 1)

    def fill(self, message):
        for name, part in get_all_nested_objects(message).items():
            self.store.put(name, part.deflate())

    def stop(self):
        for server in (self.fleet, self.app):
            server.stop(None).wait(SOON)


class Counting(grpc.ServerInterceptor):
    """Notes the calls that come."""

    def __init__(self, calls):
        self._calls = calls

    def intercept_service(self, continuation, details):
        self._calls.append(details.method.rpartition("/")[2])
        return continuation(details)


@pytest.fixture(scope="module")
def superlink(tmp_path_factory):
    superlink = SuperLink(tmp_path_factory.mktemp("superlink"))
    yield superlink
    superlink.stop()


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    superlink = SuperLink(tmp_path_factory.mktemp("stock"), ours=False)
    yield superlink
    superlink.stop()


@pytest.fixture(params=["ours", "stock"])
def either(request, superlink, stock):
    return {"ours": superlink, "stock": stock}[request.param]


@contextmanager
def together(link, place=0):
    with link.channel(link.keys[place]) as channel:
        yield Batches(FleetStub(channel), channel, "Fleet")


def pulls(link, message, place=0):
    return [
        PullObjectRequest(node=link.nodes[place], run_id=link.run, object_id=part.object_id)
        for part in iterate_object_tree(get_object_tree(message))
    ]


def pushes(link, message, place=0):
    """The requests of a node that has announced a message."""
    link.store.assign(message.object_id, link.nodes[place].node_id)
    return [
        PushObjectRequest(
            node=link.nodes[place], run_id=link.run, object_id=name, object_content=part.deflate()
        )
        for name, part in get_all_nested_objects(message).items()
    ]


def post(channel, content, node=None, api="Fleet", name="PushObject"):
    """A call with the header, whatever its content."""
    call = channel.unary_unary(
        f"/flwr.proto.{api}/{name}",
        request_serializer=PushObjectRequest.SerializeToString,
        response_deserializer=protocol.PullObjectResponse.FromString,
    )
    request = PushObjectRequest(node=node, object_content=content)
    return call(request, metadata=(HEADER,), timeout=SOON)


def refused(call, *arguments, **named):
    with pytest.raises(grpc.RpcError) as error:
        call(*arguments, **named)
    return error.value.code().name, error.value.details()


def written(*requests, name="PullObject"):
    return packed(part for each in requests for part in (name.encode(), each.SerializeToString()))


def test_calls_that_go_together_are_answered_as_each_alone(either):
    message = either.send(0)
    either.fetch(0)
    requests = pulls(either, message)
    with together(either) as calls, either.channel(either.keys[0]) as channel:
        pushed = calls.make_all(either.nodes[0], either.run, pushes(either, message)[:-1])
        assert all(answer.stored for answer in pushed)
        alone = [FleetStub(channel).PullObject(request) for request in requests]
        assert calls.make_all(either.nodes[0], either.run, requests) == alone
    assert [answer.object_available for answer in alone] == [True] * (len(alone) - 1) + [False]


def test_a_superlink_that_does_not_take_calls_together_is_asked_once(stock):
    requests = pulls(stock, stock.send(0))
    with together(stock) as calls:
        stock.calls.clear()
        for _ in range(2):
            assert len(calls.make(stock.nodes[0], stock.run, requests)) == 1
    assert stock.calls == ["PullObject"] * 3


def test_calls_go_on_when_a_superlink_that_does_not_take_them_together_is_in_its_place(
    stock,
):
    message = stock.send(0)
    stock.fill(message)
    with together(stock) as calls:
        calls._taken = True
        answers = calls.make_all(stock.nodes[0], stock.run, pulls(stock, message))
    assert all(answer.object_available for answer in answers)


def test_what_is_too_much_for_one_call_comes_with_the_next(superlink, monkeypatch):
    message = superlink.send(0, size=9)
    superlink.fill(message)
    superlink.fetch(0)
    monkeypatch.setattr("flwr_distill.flower.line_1_32.fleet.calls.MAX_BYTES", 20_000)
    with together(superlink) as calls:
        requests = pulls(superlink, message)
        assert 1 <= len(calls.make(superlink.nodes[0], superlink.run, requests)) < len(requests)
        answers = calls.make_all(superlink.nodes[0], superlink.run, requests)
    assert all(answer.object_available for answer in answers)


def test_a_call_sends_no_more_bytes_than_go_together(superlink, monkeypatch):
    message = superlink.send(0, size=9)
    monkeypatch.setattr(protocol, "MAX_BYTES", 20_000)
    sizes = []
    with together(superlink) as calls:
        sent = calls._post

        def noting(request, **named):
            sizes.append(len(request.object_content))
            return sent(request, **named)

        calls._post = noting
        answers = calls.make_all(superlink.nodes[0], superlink.run, pushes(superlink, message))
    assert all(answer.stored for answer in answers)
    assert len(sizes) > 1
    assert max(sizes) < 20_000 + 1000


def test_a_refused_call_leaves_nothing_of_the_others(superlink):
    message = superlink.send(0)
    crooked = PushObjectRequest(
        node=superlink.nodes[0], run_id=superlink.run, object_id="no hash", object_content=b"x"
    )
    requests = pushes(superlink, message)
    content = written(*requests, name="PushObject") + packed([b"PushObject", b"\xff"])
    with superlink.channel(superlink.keys[0]) as channel:
        assert refused(post, channel, content, superlink.nodes[0])[0] == "INVALID_ARGUMENT"
        assert superlink.store.get(requests[0].object_id) == b""
    with together(superlink) as calls:
        *stored, last = calls.make_all(superlink.nodes[0], superlink.run, [*requests, crooked])
    assert all(answer.stored for answer in stored)  # what Flower alone does not take is not stored
    assert not last.stored


def test_what_is_answered_is_on_the_disk(superlink):
    message = superlink.send(0)
    with together(superlink) as calls:
        calls.make_all(superlink.nodes[0], superlink.run, pushes(superlink, message))
        other = SqlObjectStore(str(superlink.file))
        other.initialize()
        for name, part in get_all_nested_objects(message).items():
            assert other.get(name) == part.deflate()


def test_who_is_not_admitted_gets_nothing(superlink):
    message = superlink.send(0)
    superlink.fill(message)
    content, node = written(*pulls(superlink, message)), superlink.nodes[0]
    stranger = ec.generate_private_key(ec.SECP256R1())
    with superlink.channel(stranger) as channel:
        assert refused(post, channel, content, node) == ("UNAUTHENTICATED", "Invalid node ID")
    with grpc.insecure_channel(superlink.fleet.bound_address) as channel:
        assert refused(post, channel, content, node)[0] == "UNAUTHENTICATED"
    for token in (None, "made up"):
        with superlink.channel(token=token) as channel:
            assert refused(post, channel, content, node, "ServerAppIo")[0] == "UNAUTHENTICATED"


def test_no_node_calls_in_the_name_of_another(superlink):
    message = superlink.send(0)
    superlink.fill(message)
    with superlink.channel(superlink.keys[1]) as channel:
        for content in (
            written(*pulls(superlink, message)),
            written(ConfirmMessageReceivedRequest(message_object_id=message.object_id)),
        ):
            code, reason = refused(post, channel, content, superlink.nodes[1])
            assert code == "INVALID_ARGUMENT"
            assert "another node" in reason or "cannot be read" in reason
        as_another = refused(post, channel, content, superlink.nodes[0])
    assert as_another == ("UNAUTHENTICATED", "Invalid node ID")
    assert message.object_id in superlink.store


@pytest.mark.parametrize(
    "content",
    [
        b"x",
        packed([b"PullObject"])[:-1],
        packed([b"PullObject"]),
        packed([b"PullObject", b"\xff\xff"]),
        packed([b"ActivateNode", b""]),
        packed([b"\xff", b""]),
        packed([b"PushMessages", b""]),
        packed([b"PullObject", b""] * (MAX_CALLS + 1)),
    ],
    ids=[
        "none",
        "cut off",
        "no content",
        "no request",
        "not together",
        "no name",
        "empty",
        "too many",
    ],
)
def test_calls_that_make_no_sense_are_refused_in_plain_words(superlink, content):
    with superlink.channel(superlink.keys[0]) as channel:
        code, reason = refused(post, channel, content, superlink.nodes[0])
    assert code == "INVALID_ARGUMENT"
    assert "Exception calling application" not in reason


def test_a_run_that_has_ended_refuses_all_calls(superlink):
    run = superlink.run
    try:
        superlink.run = superlink.start_run()
        message, ended = superlink.send(0), superlink.run
        assert superlink.state.finish_task(superlink.task, "completed", "")
        with together(superlink) as calls:
            requests = pushes(superlink, message)
            code, reason = refused(calls.make, superlink.nodes[0], ended, requests)
        assert (code, reason) == ("PERMISSION_DENIED", "Run is finished.")
    finally:
        superlink.run = run
        superlink.start_run()


def test_a_serverapp_makes_calls_together_with_its_token(superlink):
    message, node = superlink.send(0), Node(node_id=SUPERLINK_NODE_ID)
    requests = [
        PushObjectRequest(
            node=node, run_id=superlink.run, object_id=name, object_content=part.deflate()
        )
        for name, part in get_all_nested_objects(message).items()
    ]
    with superlink.channel(token=superlink.token) as channel:
        calls = Batches(ServerAppIoStub(channel), channel, "ServerAppIo")
        superlink.calls.clear()
        answers = calls.make_all(node, superlink.run, requests)
    assert all(answer.stored for answer in answers)
    assert superlink.calls == ["PullObject", "PushObject"]


class NodeCalls:
    """What Flower's loop does for a message, with our stub."""

    def __init__(self, link, channel, place=0):
        self.link, self.place, self.node = link, place, link.nodes[place]
        self.stub = BatchingStub(channel)

    def pull(self, message):
        findings = self.stub.PullMessages(PullMessagesRequest(node=self.node))
        assert [each.metadata.message_id for each in findings.messages_list] == [message.object_id]
        return {
            request.object_id: self.stub.PullObject(request)
            for request in pulls(self.link, message, self.place)
        }

    def confirm(self, message):
        self.stub.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(
                node=self.node, run_id=self.link.run, message_object_id=message.object_id
            )
        )

    def announce(self, reply):
        header = message_to_proto(remove_content_from_message(reply))
        response = self.stub.PushMessages(
            PushMessagesRequest(
                node=self.node,
                messages_list=[header],
                message_object_trees=[get_object_tree(reply)],
                clientapp_runtime_list=[0.1],
            )
        )
        return [
            request
            for request in pushes(self.link, reply, self.place)
            if request.object_id in response.objects_to_push
        ]

    def answers(self, message):
        """The reply that the SuperLink has for the ServerApp."""
        return self.link.state.get_message_res({message.object_id})


def reply_to(message, size=2, seed=0):
    generator = np.random.default_rng(seed)
    arrays = ArrayRecord([generator.standard_normal(size) for _ in range(3)])
    reply = Message(RecordDict({"arrays": arrays}), reply_to=message)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    return reply


@contextmanager
def calls_of_node(link):
    with link.channel(link.keys[0]) as channel:
        yield NodeCalls(link, channel)


@pytest.mark.parametrize("size", [2, 20_000, 300_000], ids=["small", "large", "very large"])
def test_a_message_and_its_reply_arrive_whole(either, size, monkeypatch):
    monkeypatch.setattr("flwr_distill.flower.line_1_32.node.connection.MAX_BYTES", 400_000)
    monkeypatch.setattr(protocol, "MAX_BYTES", 400_000)
    message = either.send(0)
    either.fill(message)
    reply = reply_to(message, size, seed=size)
    with calls_of_node(either) as node:
        findings = node.pull(message)
        assert {name: each.object_content for name, each in findings.items()} == {
            name: part.deflate() for name, part in get_all_nested_objects(message).items()
        }
        node.confirm(message)
        assert all(node.stub.PushObject(request).stored for request in node.announce(reply))
        (result,) = node.answers(message)
    assert result.metadata.message_id == reply.object_id
    assert message.object_id not in either.store
    for name, part in get_all_nested_objects(reply).items():
        assert either.store.get(name) == part.deflate()


def test_a_message_costs_three_calls(superlink):
    with calls_of_node(superlink) as node:
        for seed in range(2):
            message = superlink.send(0)
            superlink.fill(message)
            superlink.calls.clear()
            node.pull(message)
            node.confirm(message)
            for request in node.announce(reply_to(message, seed=100 + seed)):
                node.stub.PushObject(request)
        assert superlink.calls == ["PullMessages", "PushObject", "PushObject"]
        assert len(node.answers(message)) == 1


def test_objects_that_come_late_are_asked_for_again_together(superlink):
    message = superlink.send(0)
    with calls_of_node(superlink) as node:
        assert not any(each.object_available for each in node.pull(message).values())
        superlink.fill(message)
        superlink.calls.clear()
        findings = [node.stub.PullObject(request) for request in pulls(superlink, message)]
    assert all(each.object_available for each in findings)
    assert superlink.calls == ["PushObject"]


def test_nothing_is_told_of_a_reply_before_all_of_it_is_there(superlink):
    message = superlink.send(0)
    superlink.fill(message)
    with calls_of_node(superlink) as node:
        node.pull(message)
        *most, last = node.announce(reply_to(message, seed=7))
        for request in most:
            node.stub.PushObject(request)
        assert not node.answers(message)
        node.stub.PushObject(last)
        assert len(node.answers(message)) == 1


def test_a_reply_whose_answer_was_lost_can_be_sent_again(superlink):
    message = superlink.send(0)
    superlink.fill(message)
    with calls_of_node(superlink) as node:
        node.pull(message)
        *most, last = node.announce(reply_to(message, seed=8))
        for request in most:
            node.stub.PushObject(request)
        post_ = node.stub._together._post

        def lost(request, **named):
            post_(request, **named)
            raise ConnectionError

        node.stub._together._post = lost
        with pytest.raises(ConnectionError):
            node.stub.PushObject(last)
        node.stub._together._post = post_
        assert node.stub.PushObject(last).stored
        assert len(node.answers(message)) == 1


def test_threads_push_and_pull_at_once(superlink):
    message = superlink.send(0, size=8)
    superlink.fill(message)
    reply = reply_to(message, seed=9)
    with calls_of_node(superlink) as node:
        findings = node.stub.PullMessages(PullMessagesRequest(node=node.node))
        assert findings.messages_list
        got = []

        def work(call, requests):
            got.extend(call(request) for request in requests)

        def in_threads(call, requests):
            threads = [
                threading.Thread(target=work, args=(call, requests[place::2])) for place in range(2)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(SOON)

        in_threads(node.stub.PullObject, pulls(superlink, message))
        assert all(each.object_available for each in got)
        got.clear()
        in_threads(node.stub.PushObject, node.announce(reply))
        assert all(each.stored for each in got)
        assert len(node.answers(message)) == 1


@given(st.lists(st.binary(max_size=20), max_size=20))
def test_what_is_put_together_is_taken_apart(parts):
    assert unpacked(packed(parts), 20) == parts


@given(st.binary(max_size=60))
def test_other_bytes_are_refused_or_mean_what_they_say(data):
    try:
        parts = unpacked(data, 3)
    except ValueError:
        return
    assert packed(parts) == data
    assert len(parts) <= 3
