"""Sending and receiving, by relay and directly: what is wrong is refused, with the reason."""

import os
import stat

import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID
from flwr.app import ConfigRecord

from flwr_distill.links import LinkError, receive, send
from flwr_distill.links.credentials import key_of
from flwr_distill.links.records import Introduction
from flwr_distill.links.transfer import introduce
from flwr_distill.task.errors import SettingsError
from tests.errors import at

from .conftest import RECEIVER, RUN, SENDER, STRANGER

PAYLOAD = bytes(range(256)) * 10


@pytest.fixture(params=["relay", "direct"])
def ends(request, party, listening, authority):
    """A sender and a receiver with certificates, and the kind of link between them."""
    sender = party(SENDER, **authority.issue("sender"))
    receiver = listening(RECEIVER, **authority.issue("receiver"))
    return sender, receiver, request.param


def delivered(links, sender, receiver, payload=PAYLOAD, purpose="models", largest=None):
    route = links.route(sender.node_id, receiver.node_id, purpose, largest)
    return links.forward(route, send(sender, route, payload))


def test_what_is_sent_arrives_and_the_server_sees_none_of_it(ends, links_of):
    sender, receiver, kind = ends
    links = links_of(sender, receiver, mode=kind)
    route = links.route(SENDER, RECEIVER, "models")
    parcel = send(sender, route, PAYLOAD)
    assert (parcel["link"], parcel["num-bytes"]) == (kind, len(PAYLOAD) + 28)
    assert len(parcel["payload"]) == (len(PAYLOAD) + 28 if kind == "relay" else 0)
    assert PAYLOAD[:32] not in parcel["payload"]
    delivery = links.forward(route, parcel)
    assert receive(receiver, delivery, "models") == PAYLOAD
    assert receiver.mailbox == []


def test_a_parcel_of_another_purpose_is_refused(ends, links_of):
    sender, receiver, kind = ends
    links = links_of(sender, receiver, mode=kind)
    delivery = delivered(links, sender, receiver)
    with pytest.raises(LinkError, match="is models, not virtual-data"):
        receive(receiver, delivery, "virtual-data")
    delivery["purpose"] = "virtual-data"  # by the server
    with pytest.raises(LinkError, match="does not open"):
        receive(receiver, delivery, "virtual-data")


def test_a_parcel_handed_to_the_wrong_node_is_refused(ends, links_of, party, authority):
    sender, receiver, kind = ends
    stranger = party(STRANGER, **authority.issue("stranger"))
    links = links_of(sender, receiver, stranger, mode=kind)
    delivery = delivered(links, sender, receiver)
    with pytest.raises(LinkError, match=f"is for node {RECEIVER}"):
        receive(stranger, delivery, "models")
    delivery["receiver"] = str(STRANGER)  # by the server
    with pytest.raises(LinkError, match=r"does not open|not in the mailbox"):
        receive(stranger, delivery, "models")


def test_a_parcel_changed_by_one_bit_is_refused(ends, links_of):
    sender, receiver, kind = ends
    delivery = delivered(links_of(sender, receiver, mode=kind), sender, receiver)
    if kind == "relay":
        payload = bytearray(delivery["payload"])
        payload[len(payload) // 2] ^= 1
        delivery["payload"] = bytes(payload)
    else:
        (token,) = receiver.mailbox
        path = receiver.store.folder / "links" / "mailbox" / token
        sealed = bytearray(path.read_bytes())
        sealed[len(sealed) // 2] ^= 1
        path.write_bytes(sealed)
    with pytest.raises(LinkError, match="does not open"):
        receive(receiver, delivery, "models")


def test_a_sender_that_the_server_made_up_is_refused(ends, links_of, party, authority):
    sender, receiver, _ = ends
    forger = party(STRANGER, **authority.issue("stranger"))
    links = links_of(sender, receiver, forger, mode="relay")
    delivery = delivered(links, forger, receiver)
    genuine = delivered(links, sender, receiver)
    for key in ("sender", "peer-key", "peer-name", "peer-certificate", "peer-signature"):
        delivery[key] = genuine[key]
    with pytest.raises(LinkError, match="does not open"):
        receive(receiver, delivery, "models")


def test_a_key_that_was_vouched_for_in_another_run_is_refused(party, links_of, authority):
    """The server of a run hands out what nodes said in one before."""
    certificates = {n: authority.issue(f"node-{n}") for n in (SENDER, RECEIVER)}
    before = [party(n, **certificates[n]) for n in (SENDER, RECEIVER)]
    now = [party(n, run_id=RUN + 1, **certificates[n]) for n in (SENDER, RECEIVER)]
    route = links_of(*before).route(SENDER, RECEIVER, "models")
    with pytest.raises(LinkError, check=at(f"node {RECEIVER}")):
        send(now[0], route, PAYLOAD)
    delivery = delivered(links_of(*before), *before)
    with pytest.raises(LinkError, check=at(f"node {SENDER}")):
        receive(now[1], delivery, "models")
    assert receive(now[1], delivered(links_of(*now), *now), "models") == PAYLOAD


@pytest.mark.parametrize("case", ["none", "other authority", "server's", "unused", "expired"])
def test_a_key_without_a_nodes_certificate_is_refused(
    party, links_of, authority, other_authority, case
):
    sender = party(SENDER, **authority.issue("sender"))
    certificate = {
        "none": lambda: {},
        "other authority": lambda: other_authority.issue("receiver"),
        "server's": lambda: authority.issue("superlink", [ExtendedKeyUsageOID.SERVER_AUTH]),
        "unused": lambda: authority.issue("plain", []),
        "expired": lambda: authority.issue("old", days=-1),
    }[case]()
    receiver = party(RECEIVER, **certificate)
    with pytest.raises(LinkError, match="not signed with"):
        delivered(links_of(sender, receiver), sender, receiver)


def test_secrets_are_this_users_only_and_last(party, listening):
    node = listening(RECEIVER)
    first = introduce(node)
    secrets = {}
    for name in ("key", "permit-key"):
        path = node.store.folder / "links" / name
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        secrets[name] = path.read_bytes()
    assert secrets["key"] not in first.values()
    assert secrets["permit-key"] == first["permit-key"]
    assert len(secrets["key"]) == len(secrets["permit-key"]) == 32
    assert introduce(node) == first
    assert introduce(party(SENDER, **{"peer-address": ""}))["permit-key"] == b""


def test_a_key_is_shown_by_signing_and_lasts_from_run_to_run(party, authority):
    own, other = authority.issue("own"), authority.issue("other")

    def introduction(run_id, node_id=7, **settings):
        return Introduction.checked(introduce(party(node_id, run_id=run_id, **settings)), "test")

    key = key_of(introduction(1, **own), 1, 7)
    assert len(key) == 64
    assert key_of(introduction(2, 8, **own), 2, 8) == key
    assert key_of(introduction(3, **other), 3, 7) not in ("", key)
    stolen = introduction(1, **own)
    assert key_of(stolen, 2, 7) == key_of(stolen, 1, 8) == ""  # of another run or node
    assert key_of(introduction(4), 4, 7) == ""
    assert key_of(stolen.model_copy(update={"certificate": b"junk"}), 1, 7) == ""


def test_several_chunks_arrive_as_one(listening, party, links_of):
    sender, receiver = party(SENDER), listening(RECEIVER)
    payload = os.urandom(3 * 2**20 + 5)
    delivery = delivered(links_of(sender, receiver, mode="direct"), sender, receiver, payload)
    assert receive(receiver, delivery, "models") == payload


def test_a_token_opens_one_parcel(ends, links_of):
    sender, receiver, kind = ends
    links = links_of(sender, receiver, mode=kind)
    route = links.route(SENDER, RECEIVER, "models")
    delivery = links.forward(route, send(sender, route, PAYLOAD))
    receive(receiver, delivery, "models")
    with pytest.raises(LinkError, match="token is spent"):
        receive(receiver, delivery, "models")
    with pytest.raises(LinkError, match="token is spent"):
        receive(receiver, links.forward(route, send(sender, route, b"another")), "models")
    assert receiver.mailbox == []


def test_a_parcel_over_its_limit_is_neither_sent_nor_forwarded_nor_opened(ends, links_of):
    sender, receiver, kind = ends
    links, size = links_of(sender, receiver, mode=kind), len(PAYLOAD) + 28
    delivery = delivered(links, sender, receiver, largest=len(PAYLOAD))
    assert receive(receiver, delivery, "models") == PAYLOAD
    route = links.route(SENDER, RECEIVER, "models", len(PAYLOAD) - 1)
    with pytest.raises(LinkError, check=at("bytes", value=size)):
        send(sender, route, PAYLOAD)
    parcel = send(sender, links.route(SENDER, RECEIVER, "models"), PAYLOAD)
    if kind == "relay":
        with pytest.raises(LinkError, check=at("bytes", value=size)):
            links.forward(route, parcel)
        delivery = links.forward(ConfigRecord({**route, "largest": 2**30}), parcel)
        delivery["largest"] = size - 1
        with pytest.raises(LinkError, match=f"{size}: more than the {size - 1} allowed"):
            receive(receiver, delivery, "models")


@pytest.mark.parametrize("change", [{"token": "../../x"}, {"peer-key": b"short"}, {"more": 1}])
def test_a_malformed_record_is_refused_on_both_sides(party, links_of, change):
    sender, receiver = party(SENDER), party(RECEIVER)
    links = links_of(sender, receiver)
    with pytest.raises(LinkError, match="route: "):
        send(sender, ConfigRecord({**links.route(SENDER, RECEIVER, "models"), **change}), PAYLOAD)
    for delivery in ({**delivered(links, sender, receiver), **change}, {}):
        with pytest.raises(LinkError, match="delivery: "):
            receive(receiver, ConfigRecord(delivery), "models")


def test_a_parcel_is_of_its_own_sender_and_run(party, links_of):
    sender, receiver, stranger = party(SENDER), party(RECEIVER), party(STRANGER)
    links = links_of(sender, receiver)
    with pytest.raises(LinkError, check=at("route")):
        send(stranger, links.route(SENDER, RECEIVER, "models"), PAYLOAD)
    with pytest.raises(LinkError, match="does not open"):
        receive(party(RECEIVER, run_id=RUN + 1), delivered(links, sender, receiver), "models")


@pytest.mark.parametrize("refusing", [False, True], ids=["nobody listens", "a full mailbox"])
def test_auto_falls_back_to_the_relay_and_says_why(
    party, listening, links_of, flower_log, refusing
):
    sender = party(SENDER)
    receiver = listening(RECEIVER, capacity=100) if refusing else party(RECEIVER)
    receiver.node_config.setdefault("peer-address", "127.0.0.1:9")
    delivery = delivered(links_of(sender, receiver), sender, receiver)
    assert delivery["link"] == "relay"
    assert "using the relay: 127.0.0.1:" in flower_log.text
    assert receive(receiver, delivery, "models") == PAYLOAD
    with pytest.raises(LinkError, check=at(receiver.node_config["peer-address"])):
        delivered(links_of(sender, receiver, mode="direct"), sender, receiver)


@pytest.mark.parametrize(
    ("address", "error", "where"),
    [("", SettingsError, "links"), ("192.0.2.1:9000", LinkError, "192.0.2.1:9000")],
    ids=["no address", "another machine without a certificate"],
)
def test_direct_links_need_an_address_and_certificates(party, links_of, address, error, where):
    sender, receiver = party(SENDER), party(RECEIVER, **{"peer-address": address})
    with pytest.raises(error, check=at(where)) as refusal:
        delivered(links_of(sender, receiver, mode="direct"), sender, receiver)
    assert "start it with --peer-" in refusal.value.remedy
