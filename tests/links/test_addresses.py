"""A server that makes addresses up, so that nodes try services of their own networks."""

import socket
import time

import pytest
from flwr.app import ConfigRecord

from flwr_distill.links import LinkError, introduce, send

from .conftest import RECEIVER, SENDER

ADDRESSES = {
    "a service inside the hospital": ("10.0.0.7:5432", "has not signed the address"),
    "the node's own machine": ("127.0.0.1:{port}", "of this machine"),
    "the same, written otherwise": ("2130706433:{port}", "of this machine"),
    "the same, in IPv6": ("[::ffff:127.0.0.1]:{port}", "of this machine"),
    "the same, as a name": ("db.localhost:{port}", "of this machine"),
    "metadata of a cloud": ("169.254.169.254:80", "of this machine"),
}


@pytest.mark.parametrize(("address", "reason"), ADDRESSES.values(), ids=ADDRESSES)
def test_a_node_connects_to_no_address_that_a_server_made_up(
    party, links_of, authority, address, reason
):
    """A listener of this machine sees no connection, and the parcel goes through the relay."""
    with socket.create_server(("127.0.0.1", 0)) as service:
        service.settimeout(0.5)
        port = service.getsockname()[1]
        sender = party(SENDER, **authority.issue("ward-1"), **{"peer-address": "10.0.0.1:9"})
        receiver = party(RECEIVER, **authority.issue("ward-2"), **{"peer-address": "10.0.0.2:9"})
        route = links_of(sender, receiver).route(SENDER, RECEIVER, "models")
        forged = ConfigRecord({**route, "address": address.format(port=port), "link": "direct"})
        with pytest.raises(LinkError, match=reason):
            send(sender, forged, b"a model")
        parcel = send(sender, ConfigRecord({**forged, "link": "auto"}), b"a model")
        assert parcel["link"] == "relay"
        with pytest.raises(TimeoutError):
            service.accept()


@pytest.mark.parametrize(
    "scheme", ["ipv4:127.0.0.1", "dns:127.0.0.1", "dns:///127.0.0.1", "unix:a"]
)
def test_no_certified_node_sends_another_to_its_own_machine_by_a_scheme(
    party, links_of, authority, scheme
):
    """gRPC takes more than HOST:PORT, and whoever has a certificate can sign that."""
    with socket.create_server(("127.0.0.1", 0)) as service:
        service.settimeout(0.5)
        own = f"{scheme}:{service.getsockname()[1]}"
        sender = party(SENDER, **authority.issue("ward-1"), **{"peer-address": "10.0.0.1:9"})
        receiver = party(RECEIVER, **authority.issue("ward-2"), **{"peer-address": own})
        route = links_of(sender, receiver).route(SENDER, RECEIVER, "models")
        direct = ConfigRecord({**route, "link": "direct"})
        with pytest.raises(LinkError, match="HOST:PORT"):
            send(sender, direct, b"a model", deadline=time.monotonic() + 2)
        with pytest.raises(TimeoutError):
            service.accept()


@pytest.mark.parametrize("forged", ["of another run", "of another node", "none"])
def test_a_signature_of_another_address_run_or_node_is_none(party, links_of, authority, forged):
    own = {"peer-address": "127.0.0.1:9"}
    sender = party(SENDER, **authority.issue("ward-1"), **own)
    receiver = party(RECEIVER, **authority.issue("ward-2"), **own)
    other = party(SENDER, **authority.issue("ward-3"), **own)
    again = party(RECEIVER, run_id=8, **receiver.node_config)
    route = links_of(sender, receiver).route(SENDER, RECEIVER, "models")
    signed = {"of another run": introduce(again), "of another node": introduce(other), "none": {}}
    signature = signed[forged].get("address-signature", b"")
    lie = ConfigRecord({**route, "address-signature": signature, "link": "direct"})
    with pytest.raises(LinkError, match="has not signed the address"):
        send(sender, lie, b"a model")


def test_without_certificates_a_node_that_has_no_local_address_connects_to_none(party, links_of):
    sender, receiver = (
        party(SENDER, **{"peer-address": ""}),
        party(RECEIVER, **{"peer-address": "127.0.0.1:9"}),
    )
    route = links_of(sender, receiver).route(SENDER, RECEIVER, "models")
    with pytest.raises(LinkError, match="of this machine"):
        send(sender, ConfigRecord({**route, "link": "direct"}), b"a model")
