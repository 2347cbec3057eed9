"""Whatever comes to a mailbox or with a message, it is a parcel or refused."""

import hashlib
from contextlib import suppress
from types import SimpleNamespace
from uuid import UUID

import grpc
import pytest
from flwr.app import ConfigRecord
from hypothesis import example, given
from hypothesis import strategies as st

from flwr_distill.links import LinkError, introduce, receive, send
from flwr_distill.links.links_pb2 import Header, Part
from flwr_distill.links.mailbox import Mailbox
from flwr_distill.links.records import Introduction, Waybill
from flwr_distill.links.routes import Links
from flwr_distill.storage.store import NodeStore

from .conftest import FUZZ, damaged

RUN, SENDER, RECEIVER = 7, 2**64 - 17, 2**64 - 18
PAYLOAD = bytes(range(100))
LARGEST = 1000


class RefusedError(Exception):
    """The mailbox refused a parcel."""


class Call:
    """What a mailbox needs of gRPC's context."""

    def auth_context(self):
        return {}

    def peer(self):
        return "ipv4:127.0.0.1:5"

    def cancel(self):
        raise AssertionError("nothing here takes long")

    def abort(self, code, reason):
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        raise RefusedError(reason)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """Sender, receiver with a mailbox, and the server's links between them."""
    folder = tmp_path_factory.mktemp("state")

    def node(node_id, **node_config):
        store = NodeStore.open(folder / str(node_id), RUN, node_id)
        return SimpleNamespace(run_id=RUN, node_id=node_id, node_config=node_config, store=store)

    sender, receiver = node(SENDER), node(RECEIVER, **{"peer-address": "127.0.0.1:1"})
    introductions = {
        n.node_id: Introduction.checked(introduce(n), "test") for n in (sender, receiver)
    }
    return SimpleNamespace(
        sender=sender,
        receiver=receiver,
        links=Links(introductions, "relay"),
        permit_key=introductions[RECEIVER].permit_key,
        mailbox=Mailbox(folder / str(RECEIVER)),
    )


def deliver(nodes, parts):
    """Whether the mailbox took what came."""
    with suppress(RefusedError):
        nodes.mailbox.Deliver(iter(parts), Call())
        return True
    return False


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
HEADERS = st.builds(
    Header,
    run_id=st.integers(0, 2**64 - 1) | st.just(RUN),
    sender=TEXT | st.just(str(SENDER)),
    receiver=TEXT | st.just(str(RECEIVER)),
    purpose=TEXT,
    token=TEXT | st.just("0" * 32),
    permit=TEXT,
    size=st.integers(0, 2**63),
    sha256=TEXT,
    largest=st.integers(0, 2**63),
)
PARTS = st.builds(Part, header=HEADERS) | st.builds(Part, chunk=st.binary(max_size=50))


@FUZZ
@given(st.lists(PARTS, max_size=4))
def test_nothing_without_a_permit_gets_into_a_mailbox(nodes, parts):
    assert not deliver(nodes, parts)


@FUZZ
@example(UUID(int=1), [b"what", b"", b"ever"], None, None)
@example(UUID(int=2), [bytes(LARGEST)], None, None)
@example(UUID(int=3), [bytes(LARGEST), b"more"], None, None)
@example(UUID(int=4), [b"what"], 5, None)
@example(UUID(int=5), [b"what"], None, hashlib.sha256(b"that").hexdigest())
@given(
    st.uuids(),
    st.lists(st.binary(max_size=400), max_size=4),
    st.none() | st.integers(0, 2**63),
    st.none() | TEXT,
)
def test_what_is_permitted_gets_in_if_it_is_as_announced_and_not_else(
    nodes, token, chunks, size, sha256
):
    whole = b"".join(chunks)
    ends = {"sender": str(SENDER), "receiver": str(RECEIVER)}
    waybill = Waybill(**ends, purpose="models", token=token.hex, largest=LARGEST)
    header = Header(
        **waybill.model_dump(),
        run_id=RUN,
        permit=waybill.permit_from(nodes.permit_key),
        size=len(whole) if size is None else size,
        sha256=hashlib.sha256(whole).hexdigest() if sha256 is None else sha256,
    )
    took = deliver(nodes, [Part(header=header), *(Part(chunk=chunk) for chunk in chunks)])
    announced = header.size == len(whole) and header.sha256 == hashlib.sha256(whole).hexdigest()
    mailbox = nodes.receiver.store.folder / "links" / "mailbox"
    taken = mailbox / token.hex
    assert took == (announced and len(whole) <= LARGEST)
    if took:
        assert taken.read_bytes() == whole
        taken.unlink()
    assert not list(mailbox.glob("*"))  # and nothing half written


def sent(nodes):
    route = nodes.links.route(SENDER, RECEIVER, "models")
    return nodes.links.forward(route, send(nodes.sender, route, PAYLOAD))


@FUZZ
@given(st.data())
def test_a_damaged_delivery_gives_the_payload_or_is_refused(nodes, data):
    delivery = sent(nodes)
    original = dict(delivery)
    for key in data.draw(st.lists(st.sampled_from(sorted(delivery)), max_size=3)):
        value = delivery[key]
        if isinstance(value, bytes):
            delivery[key] = data.draw(damaged(value))
        else:
            delivery[key] = data.draw(TEXT | st.integers(-9, 9) | st.binary(max_size=40))
    try:
        assert receive(nodes.receiver, delivery, "models") == PAYLOAD
    except LinkError:
        assert dict(delivery) != original
    else:
        assert delivery["payload"] == original["payload"]


RECORDS = st.dictionaries(
    st.sampled_from(["sender", "receiver", "purpose", "token", "link", "payload", "peer-key", "x"]),
    TEXT | st.binary(max_size=40) | st.integers(-9, 9) | st.sampled_from(["relay", "direct"]),
)


@FUZZ
@given(RECORDS)
def test_a_record_that_is_no_delivery_is_refused(nodes, record):
    with pytest.raises(LinkError):
        receive(nodes.receiver, ConfigRecord(record), "models")
