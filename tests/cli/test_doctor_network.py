"""`flwr-distill doctor` on ports, certificates and clocks, with Flower's own server."""

import datetime
import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from flwr.server.app import _run_fleet_api_grpc_rere
from flwr.server.superlink.fleet.grpc_rere import node_auth_server_interceptor
from flwr.supercore.date import now
from flwr.supercore.object_store import ObjectStoreFactory

import flwr_distill.fleet.authority
import flwr_distill.fleet.checkup
from flwr_distill.fleet.certificates import CertificateFolder
from flwr_distill.fleet.checkup import checkup
from flwr_distill.fleet.local_federation import free_ports
from flwr_distill.flower.line_1_32.fleet.clock import ClockError, clock_offset
from flwr_distill.node.settings import load_settings
from tests.proxies import proxy


@pytest.fixture(scope="module")
def superlink():
    """Address of the Fleet API of a SuperLink that knows no node."""
    state = SimpleNamespace(get_node_id_by_public_key=lambda key: None)
    states: Any = SimpleNamespace(state=lambda: state)
    server = _run_fleet_api_grpc_rere(
        "127.0.0.1:0",
        states,
        ObjectStoreFactory(),
        enable_supernode_auth=True,
        certificates=None,
        interceptors=[node_auth_server_interceptor.NodeAuthServerInterceptor(states)],
    )
    yield str(server.bound_address)  # type: ignore[attr-defined]
    server.stop(None)


@pytest.fixture
def ahead(monkeypatch):
    """Sets the SuperLink's clock ahead by so many seconds."""

    def shift(seconds):
        shifted = datetime.timedelta(seconds=seconds)
        monkeypatch.setattr(node_auth_server_interceptor, "now", lambda: now() + shifted)

    return shift


def findings(**settings):
    return {finding.check: finding for finding in checkup(load_settings(None, settings))}


@pytest.mark.parametrize("seconds", [0.0, 2.5, -4.0, 200.0, 1234.5, -3500.0])
def test_the_superlinks_clock_is_measured_by_what_it_refuses(superlink, ahead, seconds):
    ahead(seconds)
    offset = clock_offset(superlink, insecure=True, root_certificates=None)
    assert offset == pytest.approx(seconds, abs=0.2)


def test_a_clock_that_flower_lets_pass_is_ok_and_one_that_it_refuses_is_not(superlink, ahead):
    for seconds, state, reason in (
        (200.0, "ok", "behind the SuperLink's"),
        (-9.0, "failed", "Flower refuses nodes over 5 s ahead or 305 s behind"),
        (320.0, "failed", "Flower refuses nodes over 5 s ahead or 305 s behind"),
        (9000.0, "failed", "the clocks are over 3600 s apart"),
    ):
        ahead(seconds)
        results = findings(superlink=superlink, insecure=True)
        assert results["SuperLink"].state == "ok"
        assert results["clock"].state == state, seconds
        assert reason in results["clock"].found


def test_a_server_that_answers_otherwise_is_not_taken_for_a_clock():
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(ClockError, match="UNIMPLEMENTED"):
            clock_offset(f"127.0.0.1:{port}", insecure=True, root_certificates=None)
    finally:
        server.stop(None)


def test_a_superlink_that_does_not_answer_fails_and_its_clock_is_not_checked(monkeypatch):
    monkeypatch.setattr(flwr_distill.fleet.checkup, "ANSWER_TIMEOUT", 0)
    (port,) = free_ports(1)
    results = findings(superlink=f"127.0.0.1:{port}", insecure=True)
    assert "no SuperLink answers" in results["SuperLink"].found
    assert (results["SuperLink"].state, results["clock"].state) == ("failed", "unchecked")


def test_the_proxy_to_a_superlink_is_named_and_why_one_is_not_used(superlink, monkeypatch):
    with proxy() as refusing:
        for name, value in refusing.variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("grpc_proxy")
        local = findings(superlink=superlink, insecure=True)
        assert (local["proxy"].state, local["SuperLink"].state) == ("ok", "ok")
        assert "loopback" in local["proxy"].found
        monkeypatch.setattr(flwr_distill.fleet.checkup, "ANSWER_TIMEOUT", 0)
        remote = findings(superlink="superlink.example:9092", insecure=True)
    assert refusing.url.removeprefix("http://") in remote["proxy"].found
    assert "https_proxy" in remote["proxy"].found
    assert "no_proxy" in remote["proxy"].found
    assert not remote["proxy"].remedy
    assert remote["SuperLink"].state == "failed"
    assert "403" in remote["SuperLink"].found
    assert "http_proxy" in findings()["proxy"].found  # of a server


def test_ports_that_are_taken_fail_where_a_server_is_to_start(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(flwr_distill.fleet.checkup, "SERVER_PORTS", {port: "Fleet API"})
        results = findings()[f"port {port}"]
    assert results.state == "failed"
    assert results.found == "Fleet API: Address already in use"
    assert "with --superlink HOST:9092" in results.remedy


@pytest.fixture(scope="module")
def issued(tmp_path_factory):
    """An authority and node-0, for localhost; and another authority, `other`."""
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("certs", "other"):
        authority = CertificateFolder(folder / name)
        authority.create(30)
        authority.issue_node("node-0", ["localhost"], 20)
    return folder


PEERS = ("peer_authority", "peer_certificate", "peer_key")


def node_files(folder, **changes):
    own = folder / "certs" / "node-0"
    files: dict[str, Any] = {
        "superlink": "127.0.0.1:1",
        "root_certificates": own / "ca.crt",
        "auth_key": own / "login.key",
        "peer_authority": own / "nodes-ca.crt",
        "peer_certificate": own / "node.crt",
        "peer_key": own / "node.key",
        "peer_address": f"localhost:{free_ports(1)[0]}",
    }
    return files | changes


def test_a_nodes_own_files_are_found_good(issued, monkeypatch):
    monkeypatch.setattr(flwr_distill.fleet.checkup, "ANSWER_TIMEOUT", 0)
    results = findings(**node_files(issued))
    for check in (
        "root-certificates",
        "peer-authority",
        "peer-certificate",
        "auth-key",
        "peer-address",
    ):
        assert results[check].state == "ok", results[check]


@pytest.mark.parametrize(
    ("without", "state", "reason"),
    [
        ((), "ok", "flower-superlink does not compare it"),
        (("auth_key",), "unchecked", "without auth-key this node makes a key up"),
        ((*PEERS, "auth_key", "root_certificates"), "unchecked", "TLS"),
    ],
    ids=["key", "no key", "no TLS"],
)
def test_who_else_could_reply_for_this_node_is_said(issued, monkeypatch, without, state, reason):
    monkeypatch.setattr(flwr_distill.fleet.checkup, "ANSWER_TIMEOUT", 0)
    files = {name: file for name, file in node_files(issued).items() if name not in without}
    results = findings(**files, insecure="root_certificates" in without)["sender of replies"]
    assert results.state == state
    assert reason in results.found
    assert bool(results.remedy) == (state == "unchecked")


def test_with_another_flower_any_node_could_reply_for_this_one(issued, monkeypatch):
    monkeypatch.setattr(flwr_distill.fleet.checkup, "ANSWER_TIMEOUT", 0)
    monkeypatch.setattr(flwr_distill.fleet.checkup, "is_another", lambda: True)
    results = findings(**node_files(issued))["sender of replies"]
    assert results.state == "unchecked"
    assert "1.32.1" in results.remedy


@pytest.mark.parametrize(
    ("changes", "check", "reason"),
    [
        ({"peer_authority": "other/nodes-ca.crt"}, "peer-certificate", "is not signed by"),
        ({"peer_authority": "certs/ca.crt"}, "peer-certificate", "is not signed by"),
        ({"peer_key": "other/node-0/node.key"}, "peer-certificate", "is not the key of"),
        ({"peer_key": "certs/ca.crt"}, "peer-certificate", "cannot be read"),
        ({"root_certificates": "certs/ca.key"}, "root-certificates", "cannot be read"),
        ({"peer_authority": "certs/ca.key"}, "peer-authority", "cannot be read"),
        ({"auth_key": "certs/ca.key"}, "auth-key", "ca.key"),
    ],
)
def test_files_that_do_not_belong_together_are_found(issued, monkeypatch, changes, check, reason):
    monkeypatch.setattr(flwr_distill.fleet.checkup, "ANSWER_TIMEOUT", 0)
    paths = {name: issued / path for name, path in changes.items()}
    results = findings(**node_files(issued, **paths))[check]
    assert results.state == "failed"
    assert reason in results.found


def test_a_certificate_that_does_not_name_the_peer_address_fails(issued, monkeypatch):
    monkeypatch.setattr(flwr_distill.fleet.checkup, "ANSWER_TIMEOUT", 0)
    results = findings(**node_files(issued, peer_address="ward-3.example.org:9200"))
    reason = "names localhost, not peer-address's ward-3.example.org"
    assert reason in results["peer-certificate"].found


@pytest.mark.parametrize(("days", "reason"), [(-40, "expired on"), (40, "which is in the future")])
def test_certificates_of_another_time_fail(tmp_path, monkeypatch, days, reason):
    then = now() + datetime.timedelta(days=days)
    with monkeypatch.context() as patch:
        patch.setattr(flwr_distill.fleet.authority, "now", lambda: then)
        CertificateFolder(tmp_path).create(30)
    monkeypatch.setattr(flwr_distill.fleet.checkup, "ANSWER_TIMEOUT", 0)
    results = findings(superlink="127.0.0.1:1", root_certificates=tmp_path / "ca.crt")
    assert results["root-certificates"].state == "failed"
    assert reason in results["root-certificates"].found


def test_a_peer_address_in_use_may_be_the_nodes_own_and_one_elsewhere_cannot(issued, monkeypatch):
    monkeypatch.setattr(flwr_distill.fleet.checkup, "ANSWER_TIMEOUT", 0)
    with socket.create_server(("localhost", 0)) as taken:
        address = f"localhost:{taken.getsockname()[1]}"
        assert findings(**node_files(issued, peer_address=address))["peer-address"].state == (
            "unchecked"
        )
    elsewhere = node_files(issued, peer_address="192.0.2.1:9200")  # an address of nobody's
    assert findings(**elsewhere)["peer-address"].state == "failed"
