"""A mailbox over real gRPC takes what the server permits, from the federation, whole and once."""

import hashlib
import logging
import os
import socket
import time

import grpc
import pytest

from client.links import LinkError, direct, introduce
from client.links.credentials import Credentials
from client.links.folder import LinkFolder, remove_expired
from client.links.mailbox_server import Mailbox, start_server
from client.links.wire import METHOD, SERVICE, Header
from task.links import Route

from .conftest import RECEIVER, RUN, SENDER, STRANGER

SEALED = os.urandom(3000)


@pytest.fixture
def refusals(caplog, monkeypatch):
    """The lines that the mailbox logs."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    caplog.set_level(logging.WARNING, "flwr")
    return caplog


@pytest.fixture
def receiver(listening):
    return listening(RECEIVER)


def route_to(links, **changes):
    route = Route.checked(links.route(SENDER, RECEIVER, "models"), "route")
    return route.model_copy(update=changes)


def call(address, stream, timeout=5):
    with grpc.insecure_channel(address) as channel:
        return channel.stream_unary(f"/{SERVICE}/{METHOD}")(iter(stream), timeout=timeout)


def header_of(route, sealed=SEALED, **changes):
    fields = route.model_dump(include={"sender", "receiver", "purpose", "token", "permit"})
    digest = hashlib.sha256(sealed).hexdigest()
    fields |= {"run_id": str(RUN), "size": len(sealed), "sha256": digest, **changes}
    return Header(**fields).model_dump_json().encode()


def test_a_permitted_parcel_comes_to_lie_in_the_mailbox(receiver, links_of):
    route = route_to(links_of(receiver))
    direct.deliver(SEALED, route, RUN, None)
    assert receiver.mailbox == [route.token]
    assert LinkFolder(receiver.store).take(route.token) == SEALED


@pytest.mark.parametrize(
    "changes",
    [
        {"sender": str(STRANGER)},
        {"purpose": "virtual-data"},
        {"token": "f" * 32},
        {"permit": "0" * 64},
    ],
    ids=["sender", "purpose", "token", "permit"],
)
def test_what_the_server_did_not_permit_is_refused(receiver, links_of, refusals, changes):
    route = route_to(links_of(receiver), **changes)
    with pytest.raises(LinkError, match="the server has not permitted it"):
        direct.deliver(SEALED, route, RUN, None)
    assert "Mailbox: refused a parcel from node" in refusals.text
    assert receiver.mailbox == []


def test_a_parcel_for_another_node_or_run_is_refused(receiver, links_of):
    route = route_to(links_of(receiver))
    with pytest.raises(LinkError, match="no mailbox for that run and receiver"):
        direct.deliver(SEALED, route.model_copy(update={"receiver": str(STRANGER)}), RUN, None)
    with pytest.raises(LinkError, match="no mailbox for that run and receiver"):
        direct.deliver(SEALED, route, RUN + 1, None)


def test_a_token_brings_one_parcel(receiver, links_of, refusals):
    route = route_to(links_of(receiver))
    direct.deliver(SEALED, route, RUN, None)
    with pytest.raises(LinkError, match="token is spent"):
        direct.deliver(b"another", route, RUN, None)
    assert "token is spent" in refusals.text
    assert LinkFolder(receiver.store).take(route.token) == SEALED


def test_a_parcel_over_the_limit_is_refused_before_it_is_sent(listening, links_of, refusals):
    receiver = listening(RECEIVER, largest=2999)
    with pytest.raises(LinkError, match="3000 bytes are more than the 2999 allowed"):
        direct.deliver(SEALED, route_to(links_of(receiver)), RUN, None)
    assert "more than the 2999 allowed" in refusals.text


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        ([SEALED[:1000]], "not of the 3000 bytes"),
        ([], "not of the 3000 bytes"),
        ([SEALED, b"more"], "not of the 3000 bytes"),
        ([SEALED[:-1] + bytes([SEALED[-1] ^ 1])], "checksum differs"),
    ],
    ids=["truncated", "nothing", "too much", "changed"],
)
def test_what_is_not_as_announced_leaves_nothing(receiver, links_of, chunks, said):
    route = route_to(links_of(receiver))
    with pytest.raises(grpc.RpcError, match=said):
        call(route.address, [header_of(route), *chunks])
    assert receiver.mailbox == []
    direct.deliver(SEALED, route, RUN, None)  # the token is not spent by that
    assert receiver.mailbox == [route.token]


def test_a_stream_that_breaks_off_leaves_nothing(receiver, links_of):
    route = route_to(links_of(receiver))

    def breaking_off():
        yield header_of(route)
        yield SEALED[:1000]
        deadline = time.monotonic() + 5
        while not receiver.mailbox and time.monotonic() < deadline:
            time.sleep(0.01)  # until the mailbox has begun to write
        assert receiver.mailbox
        raise ConnectionError

    with pytest.raises(grpc.RpcError):
        call(route.address, breaking_off())
    deadline = time.monotonic() + 5
    while receiver.mailbox and time.monotonic() < deadline:
        time.sleep(0.01)
    assert receiver.mailbox == []


@pytest.mark.parametrize("first", [[], [b"{}"], [b"garbage"], [b"\xff" * 100]])
def test_a_malformed_header_is_refused(receiver, first, refusals):
    with pytest.raises(grpc.RpcError, match="header is malformed"):
        call(receiver.node_config["peer-address"], first)
    assert "header is malformed" in refusals.text


def test_a_header_cannot_name_files_elsewhere(receiver, links_of):
    route = route_to(links_of(receiver))
    header = header_of(route).replace(str(RUN).encode(), b"../../..")
    with pytest.raises(grpc.RpcError, match="header is malformed"):
        call(route.address, [header, SEALED])


@pytest.mark.parametrize("case", ["no certificate", "no TLS", "other authority"])
def test_a_peer_without_the_federations_certificate_is_refused(
    listening, links_of, authority, other_authority, case
):
    receiver = listening(RECEIVER, **authority.issue("receiver"))
    route = route_to(links_of(receiver))
    stranger = Credentials.of(other_authority.issue("stranger"))
    ours = Credentials.of(authority.issue("sender"))
    credentials = {
        "no certificate": Credentials(ours.authority, None, None),
        "no TLS": None,
        "other authority": Credentials(ours.authority, stranger.certificate, stranger.key),
    }[case]
    with pytest.raises(LinkError, match="no transfer to"):
        direct.deliver(SEALED, route, RUN, credentials)
    assert receiver.mailbox == []
    direct.deliver(SEALED, route, RUN, ours)
    assert receiver.mailbox == [route.token]


def test_a_mailbox_without_the_federations_certificate_gets_nothing(
    listening, links_of, authority, other_authority
):
    receiver = listening(RECEIVER, **other_authority.issue("receiver"))
    ours = Credentials.of(authority.issue("sender"))
    with pytest.raises(LinkError, match="no transfer to"):
        direct.deliver(SEALED, route_to(links_of(receiver)), RUN, ours)
    assert receiver.mailbox == []


def test_an_address_that_answers_nothing_is_given_up(receiver, links_of, monkeypatch):
    monkeypatch.setattr(direct, "_OPTIONS", [("grpc.min_reconnect_backoff_ms", 300)])
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        begin = time.monotonic()
        with pytest.raises(LinkError, match="no transfer to"):
            direct.deliver(SEALED, route_to(links_of(receiver), address=address), RUN, None)
        assert time.monotonic() - begin < 5


def test_what_nobody_took_expires_and_the_rest_stays(receiver, links_of):
    old, fresh = (route_to(links_of(receiver)) for _ in range(2))
    folder = receiver.store.folder / "links"
    for route in (old, fresh):
        direct.deliver(SEALED, route, RUN, None)
    (folder / "mailbox" / ".begun").write_bytes(b"left by a mailbox that was killed")
    for name in (old.token, ".begun"):
        os.utime(folder / "mailbox" / name, (time.time() - 100, time.time() - 100))
    remove_expired(receiver.state_dir, expiry=50)
    assert receiver.mailbox == [fresh.token]
    assert (folder / "key").exists()


def test_a_port_that_is_taken_is_an_error_with_the_settings_name(receiver, party):
    introduce(receiver)
    address = receiver.node_config["peer-address"]
    with pytest.raises(LinkError, match=f"peer-address={address}: the mailbox cannot listen"):
        start_server(Mailbox(party(STRANGER).state_dir), address, None)
