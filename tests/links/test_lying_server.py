"""A server that lies about who is who, with every certificate that it can get hold of.

The authority is on another machine, and nodes made their keys themselves. What the server has: its
own certificate, a user's, an authority that it made up, and a node that it had certified.
"""

from pathlib import Path

import pytest
from flwr.app import ConfigRecord

from flwr_distill.fleet.certificates import CertificateFolder
from flwr_distill.fleet.node_request import request_node
from flwr_distill.links import LinkError, receive, send
from flwr_distill.links.credentials import Credentials

from .conftest import RECEIVER, SENDER, STRANGER

PAYLOAD = b"virtual data" * 100
NAMES = "ward-1,ward-2"


def authority_at(folder):
    authority = CertificateFolder(folder)
    authority.create(10)
    both = authority.certificate.read_bytes() + (folder / "nodes-ca.crt").read_bytes()
    everyone(authority).write_bytes(both)
    return authority


def everyone(authority):
    """What a node trusts that knows servers and users by one file with nodes."""
    return authority.certificate.with_name("everyone.crt")


def node_config(certificate, key, trusted):
    files = {"peer-authority": trusted, "peer-certificate": certificate, "peer-key": key}
    return {name: str(path) for name, path in files.items()}


def certified(authority, name, own, trusted=None):
    """Node config of a node with a key of its own that `authority` has certified."""
    request_node(own, name, ["127.0.0.1"])
    authority.sign((own / "node.csr").read_bytes(), 5, ["127.0.0.1"])
    issued = authority.certificate.parent / name / "node.crt"
    return node_config(issued, own / "node.key", trusted or everyone(authority))


@pytest.fixture
def federation(tmp_path, party):
    """The authority, and two nodes that know each other's names."""
    authority = authority_at(tmp_path / "authority")
    informed = {"peer-names": NAMES, "peer-revocations": str(authority.nodes_revocations)}
    nodes = [
        party(node_id, **certified(authority, name, tmp_path / name), **informed)
        for node_id, name in ((SENDER, "ward-1"), (RECEIVER, "ward-2"))
    ]
    return authority, *nodes


def stolen(case, authority, folder):
    """Node config with which the server itself takes a node's place."""
    if case == "its own certificate":
        authority.issue_server(["127.0.0.1"], 5)
        held = authority.certificate.parent / "server"
        return node_config(held / "server.crt", held / "server.key", everyone(authority))
    if case == "a user's":
        authority.issue_user("alice", "operator", 5)
        held = authority.certificate.parent / "alice"
        return node_config(held / "user.crt", held / "user.key", everyone(authority))
    if case == "its own authority's":
        own = authority_at(folder / "made-up")
        return certified(own, "ward-2", folder / "forged", everyone(authority))
    return certified(authority, "mole", folder / "mole")


CASES = {
    "its own certificate": "not for client and server authentication",
    "a user's": "not for client and server authentication",
    "its own authority's": "not signed with a certificate of the federation",
    "a node's that it registered": "is mole, which is not among peer-names",
}


@pytest.mark.parametrize(("case", "said"), CASES.items())
def test_it_gets_nothing_that_is_meant_for_another(
    federation, party, links_of, tmp_path, case, said
):
    authority, sender, _ = federation
    server = party(RECEIVER, **stolen(case, authority, tmp_path))
    with pytest.raises(LinkError, match=said):
        send(sender, links_of(sender, server).route(SENDER, RECEIVER, "models"), PAYLOAD)


@pytest.mark.parametrize(("case", "said"), CASES.items())
def test_it_hands_over_nothing_in_another_nodes_name(
    federation, party, links_of, tmp_path, case, said
):
    authority, _, receiver = federation
    server = party(SENDER, **stolen(case, authority, tmp_path))
    links = links_of(server, receiver)
    route = links.route(SENDER, RECEIVER, "models")
    delivery = links.forward(route, send(server, route, PAYLOAD))
    with pytest.raises(LinkError, match=said):
        receive(receiver, delivery, "models")


def test_what_is_meant_for_one_node_is_not_redirected_to_another_by_its_name(
    federation, party, links_of, tmp_path
):
    authority, sender, receiver = federation
    third = party(STRANGER, **certified(authority, "ward-3", tmp_path / "ward-3"))
    links = links_of(sender, receiver, third)
    theirs = links.route(SENDER, STRANGER, "models")
    route = {**links.route(SENDER, RECEIVER, "models")}
    for key in ("peer-key", "peer-certificate", "peer-signature"):
        route[key] = theirs[key]
    with pytest.raises(LinkError, match="wrong signature"):  # it was for another node id
        send(sender, ConfigRecord(route), PAYLOAD)
    with pytest.raises(LinkError, match="is ward-3, and the server says 'ward-2'"):
        send(sender, ConfigRecord({**theirs, "peer-name": "ward-2"}), PAYLOAD)


def test_a_revoked_node_neither_delivers_nor_gets_anything_whatever_the_server_says(
    federation, links_of
):
    authority, sender, receiver = federation
    links = links_of(sender, receiver)
    route = links.route(SENDER, RECEIVER, "models")
    delivery = links.forward(route, send(sender, route, PAYLOAD))
    authority.mark_revoked("ward-1")
    with pytest.raises(LinkError, match="is ward-1, whose certificate is revoked"):
        receive(receiver, delivery, "models")
    with pytest.raises(LinkError, match="is ward-1, whose certificate is revoked"):
        send(receiver, links.route(RECEIVER, SENDER, "models"), PAYLOAD)


def test_a_renewed_certificate_works_within_the_run(federation, links_of):
    authority, sender, receiver = federation
    links_of(sender, receiver)
    before = Path(sender.node_config["peer-certificate"]).read_bytes()
    authority.renew("ward-1", 9)
    assert Credentials.of(sender.node_config).certificate != before
    links = links_of(sender, receiver)
    route = links.route(SENDER, RECEIVER, "models")
    delivery = links.forward(route, send(sender, route, PAYLOAD))
    assert receive(receiver, delivery, "models") == PAYLOAD
