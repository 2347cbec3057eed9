"""Hostile or broken peers cost a mailbox, and those that send to it, a bounded time and space."""

import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest

from flwr_distill.links import LinkError, direct, mailbox, receive, send, streams
from flwr_distill.links.credentials import Credentials
from flwr_distill.links.folder import LinkFolder
from flwr_distill.links.links_pb2 import Part
from flwr_distill.links.links_pb2_grpc import (
    MailboxServicer,
    MailboxStub,
    add_MailboxServicer_to_server,
)
from flwr_distill.links.records import Route
from flwr_distill.links.streams import STREAMS_OF_A_CERTIFICATE, Admission, Peer, time_for
from flwr_distill.links.transfer import introduce
from tests.errors import at
from tests.waiting import wait_until

from .conftest import RECEIVER, RUN, SENDER
from .test_direct import SEALED, header_of, route_to


@contextmanager
def silent_streams(channel, count, *first):
    """Streams into a mailbox that send these parts and then nothing; yields their calls."""
    end = threading.Event()

    def parts():
        yield from first
        end.wait()

    calls = [MailboxStub(channel).Deliver.future(parts()) for _ in range(count)]
    try:
        yield calls
    finally:
        end.set()
        for call in calls:
            call.cancel()


def test_eight_silent_streams_keep_nobody_out(listening, links_of):
    receiver = listening(RECEIVER)
    route = route_to(links_of(receiver))
    with grpc.insecure_channel(route.address) as channel, silent_streams(channel, 8):
        time.sleep(0.3)  # until they have come
        direct.deliver(SEALED, route, RUN, None, 3)
    assert receiver.mailbox == [route.token]


def test_a_stream_without_a_header_is_closed(listening, flower_log, monkeypatch):
    monkeypatch.setattr(mailbox, "HEADER_TIMEOUT", 0.2)
    receiver = listening(RECEIVER)
    address = receiver.node_config["peer-address"]
    with grpc.insecure_channel(address) as channel, silent_streams(channel, 1) as (call,):
        assert call.exception(timeout=5).code() == grpc.StatusCode.CANCELLED
    wait_until(lambda: "is too slow: it is closed" in flower_log.text)


def test_a_stream_that_is_too_slow_is_closed_and_leaves_nothing(listening, links_of, monkeypatch):
    monkeypatch.setattr(mailbox, "time_for", lambda size: 0.2)
    receiver = listening(RECEIVER)
    route = route_to(links_of(receiver))
    first = [header_of(route), Part(chunk=SEALED[:1000])]
    channel = grpc.insecure_channel(route.address)
    with channel, silent_streams(channel, 1, *first) as (call,):
        assert call.exception(timeout=5).code() == grpc.StatusCode.CANCELLED
    wait_until(lambda: not receiver.mailbox)
    direct.deliver(SEALED, route, RUN, None, 3)


def test_the_time_for_a_parcel_grows_with_it():
    assert time_for(0) == 30
    assert time_for(2**24) == 30 + 1024  # 16 KiB/s


def test_a_certificate_has_few_streams_and_others_have_theirs(
    listening, links_of, authority, flower_log
):
    receiver = listening(RECEIVER, **authority.issue("receiver"))
    route = route_to(links_of(receiver))
    hostile, honest = (Credentials.of(authority.issue(name)) for name in ("hostile", "honest"))
    channel = direct._open_channel(route.address, hostile)
    with channel, silent_streams(channel, STREAMS_OF_A_CERTIFICATE):
        time.sleep(0.5)  # until they have come
        with pytest.raises(LinkError, match="no time is left"):
            direct.deliver(SEALED, route, RUN, hostile, 1)
        direct.deliver(SEALED, route, RUN, honest, 3)
    assert receiver.mailbox == [route.token]
    assert f"{STREAMS_OF_A_CERTIFICATE} streams are open" in flower_log.text


def test_more_senders_than_a_mailbox_takes_at_once_get_through_one_after_the_other(
    listening, links_of, authority, monkeypatch
):
    monkeypatch.setattr(streams, "STREAMS_OF_A_CERTIFICATE", 1)
    receiver = listening(RECEIVER, **authority.issue("receiver"))
    sender = Credentials.of(authority.issue("sender"))
    links = links_of(receiver)
    routes = [route_to(links) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda route: direct.deliver(SEALED, route, RUN, sender, 20), routes))
    assert receiver.mailbox == sorted(route.token for route in routes)


def test_a_full_mailbox_refuses_until_parcels_are_taken(listening, links_of, flower_log):
    receiver = listening(RECEIVER, capacity=2 * len(SEALED))
    links = links_of(receiver)
    first, second, third = (route_to(links) for _ in range(3))
    for route in (first, second):
        direct.deliver(SEALED, route, RUN, None, 3)
    with pytest.raises(LinkError, match="bytes in the mailbox = 6000"):
        direct.deliver(SEALED, third, RUN, None, 3)
    LinkFolder(receiver.store).take(first.token)
    direct.deliver(SEALED, third, RUN, None, 3)
    assert "of 6000 allowed are stored" in flower_log.text


def test_one_certificate_fills_a_part_of_a_mailbox_only(tmp_path):
    admission = Admission(tmp_path, capacity=4000)
    folder = tmp_path / "runs" / "1" / "2" / "links" / "mailbox"
    folder.mkdir(parents=True)
    hostile, honest = Peer("hostile", certified=True), Peer("honest", certified=True)
    with admission.space(hostile, 600, folder / "a"):
        (folder / "a").write_bytes(bytes(600))
    with (
        pytest.raises(LinkError, check=at("bytes in the mailbox", value=600)),
        admission.space(hostile, 401, folder / "b"),
    ):
        pass
    with (
        admission.space(hostile, 400, folder / "b"),
        admission.space(honest, 1000, folder / "c"),
        pytest.raises(LinkError, match="on its way already"),
        admission.space(honest, 0, folder / "c"),
    ):
        pass


def test_a_permit_of_its_own_size_does_not_let_more_in(listening, links_of, flower_log):
    receiver = listening(RECEIVER)
    route = route_to(links_of(receiver))
    with grpc.insecure_channel(route.address) as channel:
        for size in (2**20 + 29, 2**63):
            with pytest.raises(grpc.RpcError, match=f"{size}: more than the 1048604"):
                MailboxStub(channel).Deliver(iter([header_of(route, size=size)]), timeout=5)
    assert "more than the 1048604 allowed" in flower_log.text


class DeafMailbox(MailboxServicer):
    """Accepts connections and never answers."""

    def __init__(self):
        self.end = threading.Event()

    def Deliver(self, parts, context):  # noqa: N802
        self.end.wait()


@pytest.fixture
def deaf():
    """Address of a deaf mailbox."""
    server = grpc.server(ThreadPoolExecutor(4))
    servicer = DeafMailbox()
    add_MailboxServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    servicer.end.set()
    server.stop(None).wait()


@pytest.mark.parametrize("mode", ["auto", "direct"])
def test_a_deaf_mailbox_costs_half_of_the_time_that_is_left(
    party, links_of, deaf, mode, flower_log
):
    sender, receiver = party(SENDER), party(RECEIVER)
    receiver.node_config["peer-address"] = deaf
    links = links_of(sender, receiver, mode=mode)
    route = links.route(SENDER, RECEIVER, "models")
    start = time.monotonic()
    if mode == "auto":
        parcel = send(sender, route, b"payload", deadline=start + 1)
        assert receive(receiver, links.forward(route, parcel), "models") == b"payload"
        assert "using the relay" in flower_log.text
    else:
        with pytest.raises(LinkError, match="no transfer"):
            send(sender, route, b"payload", deadline=start + 1)
    assert time.monotonic() - start < 1
    if mode == "direct":
        with pytest.raises(LinkError, match="no time is left"):
            send(sender, route, b"payload", deadline=time.monotonic() - 1)


def test_a_full_disk_refuses_a_parcel_and_keeps_nothing_of_it(
    listening, links_of, flower_log, monkeypatch
):
    receiver = listening(RECEIVER)
    route = Route.checked(links_of(receiver).route(SENDER, RECEIVER, "models"), "route")

    def full(source, target, **folders):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", full)
        with pytest.raises(LinkError, match="No space left on device"):
            direct.deliver(SEALED, route, RUN, None, 3)
    assert "No space left" in flower_log.text
    assert receiver.mailbox == []
    direct.deliver(SEALED, route, RUN, None, 3)


@pytest.mark.parametrize("damaged", [b"", b"half"])
def test_a_key_that_a_power_cut_left_empty_is_made_anew(party, listening, damaged, flower_log):
    node = listening(RECEIVER)
    first = introduce(node)
    for name in ("key", "permit-key"):
        (node.store.folder / "links" / name).write_bytes(damaged)
    folder = LinkFolder(node.store)
    with pytest.raises(LinkError, match="no mailbox for that run"):
        folder.existing_permit_key()
    again = introduce(node)
    assert again["public-key"] != first["public-key"]
    assert len(again["permit-key"]) == 32
    assert flower_log.text.count("is damaged") == 2
    assert introduce(node) == again
