"""Registering a fleet asks the SuperLink for its list of nodes once."""

from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives import serialization
from flwr.proto.control_pb2 import ListNodesResponse
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from typer.testing import CliRunner

from flwr_distill.cli import connection
from flwr_distill.cli.main import app
from flwr_distill.fleet.authority import new_key
from flwr_distill.fleet.certificates import CertificateFolder
from flwr_distill.flower.control import SuperLinkError
from flwr_distill.flower.line_1_32.fleet.superlink import Control


@pytest.fixture
def control():
    """A connection to a SuperLink that counts what it is asked."""
    registered, calls = {}, []

    def list_nodes(request, timeout):
        calls.append("ListNodes")
        return ListNodesResponse(nodes_info=list(registered.values()))

    def register_node(request, timeout):
        calls.append("RegisterNode")
        assert request.public_key not in registered
        node = NodeInfo(node_id=len(registered) + 1, public_key=request.public_key)
        registered[request.public_key] = node
        return SimpleNamespace(node_id=node.node_id)

    created = Control("localhost:1")
    created._stub = SimpleNamespace(
        ListNodes=list_nodes,
        RegisterNode=register_node,
        UnregisterNode=lambda request, timeout: None,
    )
    created.calls = calls
    created.registered = registered
    return created


def open_ssh(key):
    return (
        key.public_key()
        .public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        .decode()
    )


def test_a_fleet_is_registered_with_one_look_at_who_is_there(control):
    old, *new = (new_key() for _ in range(5))
    name = public_key_to_bytes(old.public_key())
    control.registered[name] = NodeInfo(node_id=9, public_key=name)
    assert control.register(open_ssh(old)) == (9, False)
    ids = [control.register(open_ssh(key)) for key in new]
    assert ids == [(2, True), (3, True), (4, True), (5, True)]
    assert control.register(open_ssh(new[0])) == (2, False)
    assert control.calls == ["ListNodes"] + ["RegisterNode"] * 4


def test_a_node_that_was_unregistered_is_not_known_any_more(control):
    key = open_ssh(new_key())
    node_id, _ = control.register(key)
    control.unregister(node_id)
    assert control.node_id(key) is None


class Refuses:
    """A SuperLink that registers one node and refuses the next."""

    def __init__(self):
        self.keys = []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def wait(self, timeout):
        pass

    def register(self, key):
        if self.keys:
            raise SuperLinkError("refused")
        self.keys.append(key)
        return 5, True


def test_what_was_registered_before_a_failure_is_noted(tmp_path, monkeypatch):
    """Other Flowers do not say later which id a key has."""
    folder = CertificateFolder(tmp_path)
    folder.create(365)
    keys = [folder.issue_node(name, [], 30).login_key for name in ("a", "b")]
    folder.note_ids({keys[0]: 4, "a revoked one's": 3})
    monkeypatch.setattr(connection, "open_control", lambda *_: Refuses())
    ended = CliRunner().invoke(app, ["register", "--dir", str(tmp_path)])
    assert ended.exit_code == 1
    assert folder.noted_ids == {keys[0]: 5}


def test_of_two_registrations_at_once_neither_loses_what_the_other_notes(tmp_path, monkeypatch):
    folder = CertificateFolder(tmp_path)
    folder.create(365)
    first = folder.issue_node("a", [], 30).login_key

    class Other(Refuses):
        def register(self, key):
            folder.issue_node("b", [], 30)
            second = folder.valid("b").login_key
            folder.note_ids({second: 6})
            self.keys.append(second)
            return 5, True

    other = Other()
    monkeypatch.setattr(connection, "open_control", lambda *_: other)
    assert CliRunner().invoke(app, ["register", "--dir", str(tmp_path)]).exit_code == 0
    assert folder.noted_ids == {first: 5, other.keys[0]: 6}
