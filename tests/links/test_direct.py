"""A mailbox over real gRPC takes what the server permits, from the federation, whole and once."""

import hashlib
import os
import socket
import time
from pathlib import Path

import grpc
import pytest

from flwr_distill.links import LinkError, direct, introduce
from flwr_distill.links.credentials import Credentials
from flwr_distill.links.folder import LinkFolder, remove_expired
from flwr_distill.links.links_pb2 import Header, Part
from flwr_distill.links.links_pb2_grpc import MailboxStub
from flwr_distill.links.mailbox import EXPIRY, Mailbox, start_server
from flwr_distill.links.records import Route, Waybill
from tests.errors import at
from tests.waiting import wait_until

from .conftest import RECEIVER, RUN, SENDER, STRANGER

SEALED = os.urandom(3000)


@pytest.fixture
def receiver(listening):
    return listening(RECEIVER)


def route_to(links, **changes):
    route = Route.checked(links.route(SENDER, RECEIVER, "models", 2**20), "route")
    return route.model_copy(update=changes)


def call(address, parts, timeout=5):
    with grpc.insecure_channel(address) as channel:
        return MailboxStub(channel).Deliver(iter(parts), timeout=timeout)


def header_of(route, **changes):
    fields = route.model_dump(include={*Waybill.model_fields, "permit"})
    fields |= {"run_id": RUN, "size": len(SEALED), "sha256": hashlib.sha256(SEALED).hexdigest()}
    return Part(header=Header(**{**fields, **changes}))


def test_a_permitted_parcel_comes_to_lie_in_the_mailbox(receiver, links_of):
    route = route_to(links_of(receiver))
    direct.deliver(SEALED, route, RUN, None, 10)
    assert receiver.mailbox == [route.token]
    assert LinkFolder(receiver.store).take(route.token) == SEALED


def test_a_token_brings_one_parcel(receiver, links_of, flower_log):
    route = route_to(links_of(receiver))
    direct.deliver(SEALED, route, RUN, None, 10)
    with pytest.raises(LinkError, match="token is spent"):
        direct.deliver(b"another", route, RUN, None, 10)
    assert "token is spent" in flower_log.text
    assert LinkFolder(receiver.store).take(route.token) == SEALED


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        ([SEALED[:1000]], "not have the announced 3000 bytes"),
        ([], "not have the announced 3000 bytes"),
        ([SEALED, b"more"], "not have the announced 3000 bytes"),
        ([SEALED[:-1] + bytes([SEALED[-1] ^ 1])], "checksum differs"),
    ],
    ids=["truncated", "nothing", "too much", "changed"],
)
def test_what_is_not_as_announced_leaves_nothing(receiver, links_of, flower_log, chunks, said):
    route = route_to(links_of(receiver))
    with pytest.raises(grpc.RpcError, match=said):
        call(route.address, [header_of(route), *(Part(chunk=chunk) for chunk in chunks)])
    assert said in flower_log.text
    assert receiver.mailbox == []
    direct.deliver(SEALED, route, RUN, None, 10)  # the token is not spent by that
    assert receiver.mailbox == [route.token]


def test_no_more_is_read_than_was_announced(receiver):
    begun = iter([SEALED[:2000], SEALED[:2000], *[SEALED] * 50])
    with pytest.raises(LinkError, match="does not have the announced 3000 bytes"):
        LinkFolder(receiver.store).put("0" * 32, begun, 3000, "")
    assert len(list(begun)) == 50
    assert receiver.mailbox == []


def test_a_stream_that_breaks_off_leaves_nothing(receiver, links_of):
    route = route_to(links_of(receiver))

    def breaking_off():
        yield header_of(route)
        yield Part(chunk=SEALED[:1000])
        wait_until(lambda: receiver.mailbox)  # it has begun to write
        raise ConnectionError

    with pytest.raises(grpc.RpcError):
        call(route.address, breaking_off())
    wait_until(lambda: not receiver.mailbox)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("no certificate", "PEER_DID_NOT_RETURN_A_CERTIFICATE"),
        ("no TLS", "WRONG_VERSION_NUMBER"),
        ("other authority", "CERTIFICATE_VERIFY_FAILED"),
    ],
)
def test_a_peer_without_the_federations_certificate_is_refused(
    mailbox_process, links_of, authority, other_authority, case, said
):
    """By gRPC itself, whose line is in the log of the node."""
    receiver, log_file = mailbox_process(RECEIVER, **authority.issue("receiver"))
    route = route_to(links_of(receiver))
    stranger = Credentials.of(other_authority.issue("stranger"))
    ours = Credentials.of(authority.issue("sender"))
    credentials = {
        "no certificate": Credentials(ours.authority, None, None),
        "no TLS": None,
        "other authority": Credentials(ours.authority, stranger.certificate, stranger.key),
    }[case]
    with pytest.raises(LinkError, match="no transfer to"):
        direct.deliver(SEALED, route, RUN, credentials, 10)
    wait_until(lambda: said in log_file.read_text())
    assert "Handshake failed" in log_file.read_text()
    assert receiver.mailbox == []
    direct.deliver(SEALED, route, RUN, ours, 10)
    assert receiver.mailbox == [route.token]


def test_an_address_that_answers_nothing_is_given_up(receiver, links_of, monkeypatch):
    monkeypatch.setattr(direct, "_OPTIONS", [("grpc.min_reconnect_backoff_ms", 300)])
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        begin = time.monotonic()
        with pytest.raises(LinkError, match="no transfer to"):
            direct.deliver(SEALED, route_to(links_of(receiver), address=address), RUN, None, 10)
        assert time.monotonic() - begin < 5


def test_what_nobody_took_expires_and_the_rest_stays(receiver, links_of):
    old, fresh = (route_to(links_of(receiver)) for _ in range(2))
    folder = receiver.store.folder / "links"
    for route in (old, fresh):
        direct.deliver(SEALED, route, RUN, None, 10)
    (folder / "mailbox" / ".begun").write_bytes(b"left by a mailbox that was killed")
    for name in (old.token, ".begun"):
        os.utime(folder / "mailbox" / name, (time.time() - 100, time.time() - 100))
    remove_expired(receiver.state_dir, expiry=50)
    assert receiver.mailbox == [fresh.token]
    assert (folder / "key").exists()


def test_a_parcel_waits_as_long_as_the_message_that_takes_it_may(receiver, links_of):
    """Of a slow node's sector, or of a node in quiet hours, that is hours."""
    route = route_to(links_of(receiver))
    direct.deliver(SEALED, route, RUN, None, 10)
    sent = time.time() - 0.99 * 86_400  # the longest that a node's app has for a message
    os.utime(receiver.store.folder / "links" / "mailbox" / route.token, (sent, sent))
    remove_expired(receiver.state_dir, EXPIRY)
    assert receiver.mailbox == [route.token]


def test_a_port_that_is_taken_is_an_error_with_the_settings_name(receiver, party):
    introduce(receiver)
    address = receiver.node_config["peer-address"]
    with pytest.raises(LinkError, check=at("peer-address", value=address)):
        start_server(Mailbox(party(STRANGER).state_dir), address, {})


@pytest.mark.parametrize("missing", ["peer-key", "file"])
def test_credentials_that_cannot_be_read_are_an_error(tmp_path, missing):
    names = ("peer-authority", "peer-certificate", "peer-key")
    config = {name: str(tmp_path / name) for name in names}
    for path in config.values():
        Path(path).write_bytes(b"")
    if missing == "file":
        (tmp_path / "peer-key").unlink()
    else:
        del config["peer-key"]
    with pytest.raises(LinkError, match="peer-key", check=at("peer credentials")):
        Credentials.of(config)


def test_a_node_says_that_its_certificate_is_about_to_expire(party, authority, flower_log):
    introduce(party(SENDER, **authority.issue("lasting", days=30)))
    assert flower_log.text == ""
    introduce(party(SENDER, **authority.issue("ending", days=3)))
    assert "ends in 3.0 days: renew it (flwr-distill certs renew)" in flower_log.text


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"sender": str(STRANGER)}, "the server has not permitted it"),
        ({"purpose": "virtual-data"}, "the server has not permitted it"),
        ({"token": "f" * 32}, "the server has not permitted it"),
        ({"permit": "0" * 64}, "the server has not permitted it"),
        ({"largest": 2**30}, "the server has not permitted it"),
        ({"receiver": str(STRANGER)}, "no mailbox for that run and receiver"),
        ({"run": RUN + 1}, "no mailbox for that run and receiver"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_the_server_did_not_permit_is_refused(receiver, links_of, flower_log, changes, why):
    run_id = changes.pop("run", RUN)
    with pytest.raises(LinkError, match=why):
        direct.deliver(SEALED, route_to(links_of(receiver), **changes), run_id, None, 10)
    assert "Mailbox: rejected a parcel from node" in flower_log.text
    assert why in flower_log.text
    assert receiver.mailbox == []


@pytest.mark.parametrize(
    "first",
    [
        lambda route: [],
        lambda route: [Part()],
        lambda route: [Part(header=Header())],
        lambda route: [Part(chunk=SEALED)],
        lambda route: [header_of(route, token="../../x"), Part(chunk=SEALED)],
        lambda route: [header_of(route, receiver="../.."), Part(chunk=SEALED)],
        lambda route: [header_of(route, sender="é"), Part(chunk=SEALED)],
    ],
    ids=["nothing", "an empty part", "an empty header", "a chunk", "token", "receiver", "sender"],
)
def test_a_malformed_header_is_refused(receiver, links_of, flower_log, first):
    route = route_to(links_of(receiver))
    with pytest.raises(grpc.RpcError, match="header is malformed"):
        call(route.address, first(route))
    assert "header is malformed" in flower_log.text
    assert receiver.mailbox == []


def test_bytes_that_are_no_message_are_refused(receiver, flower_log):
    """By gRPC; the line in our log comes a moment later."""
    with grpc.insecure_channel(receiver.node_config["peer-address"]) as channel:
        raw = channel.stream_unary("/flwr_distill.Mailbox/Deliver")
        with pytest.raises(grpc.RpcError, match="deserializing"):
            raw(iter([b"\xff" * 100]), timeout=5)
    wait_until(lambda: "header is malformed" in flower_log.text)


@pytest.mark.parametrize("case", ["of another authority", "expired"])
def test_a_mailbox_without_a_valid_certificate_gets_nothing_until_it_is_renewed(
    listening, links_of, authority, other_authority, case
):
    """Renewed under the running mailbox, it counts from the next connection on."""
    other = other_authority.issue("renewed")
    receiver = listening(
        RECEIVER, **(other if case != "expired" else authority.issue("renewed", days=-1))
    )
    route, ours = route_to(links_of(receiver)), Credentials.of(authority.issue("sender"))
    with pytest.raises(LinkError, match="no transfer to"):
        direct.deliver(SEALED, route, RUN, ours, 2)
    assert receiver.mailbox == []
    renewed = authority.issue("renewed")
    for name, path in other.items() if case != "expired" else ():
        Path(path).write_bytes(Path(renewed[name]).read_bytes())
    direct.deliver(SEALED, route, RUN, ours, 10)
    assert receiver.mailbox == [route.token]


def test_an_unreadable_renewal_keeps_the_certificate_in_use(
    listening, links_of, authority, flower_log
):
    receiver = listening(RECEIVER, **authority.issue("torn"))
    route = route_to(links_of(receiver))
    Path(receiver.node_config["peer-certificate"]).unlink()
    direct.deliver(SEALED, route, RUN, Credentials.of(authority.issue("sender")), 10)
    assert receiver.mailbox == [route.token]
    assert "keeping the previous certificate" in flower_log.text
