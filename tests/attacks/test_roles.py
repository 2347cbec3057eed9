"""Who is who: no node takes the SuperLink's place, and no ServerApp reaches the Control API."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import ExtendedKeyUsageOID
from flwr.proto.fleet_pb2_grpc import FleetServicer, FleetStub, add_FleetServicer_to_server
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest, SendNodeHeartbeatResponse
from typer.testing import CliRunner

from flwr_distill.cli.main import app
from flwr_distill.fleet.authority import CertificateError, new_key, subject_of
from flwr_distill.fleet.certificates import CertificateFolder
from flwr_distill.fleet.node_request import SERVER, read_request, request_node
from flwr_distill.links.credentials import Credentials
from flwr_distill.links.direct import deliver
from flwr_distill.links.errors import LinkError
from flwr_distill.links.mailbox import Mailbox, start_server
from flwr_distill.links.records import Route
from flwr_distill.node.peers import check_peers
from flwr_distill.node.settings import NodeError, NodeSettings
from tests.errors import at

ROOT = Path(__file__).resolve().parents[2]
HOST = "fl.example.org"


@pytest.fixture
def folder(tmp_path):
    """A federation: its authorities, and the SuperLink's certificate."""
    authority = CertificateFolder(tmp_path / "certs")
    authority.create(40)
    authority.issue_server([HOST, "10.0.0.1", "localhost"], 20)
    return authority


def certs(folder, *arguments, stdin=None):
    where = ("--dir", str(folder.certificate.parent))
    return CliRunner().invoke(app, ["certs", *arguments, *where], input=stdin)


def names_in(file):
    certificate = x509.load_pem_x509_certificate(file.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {str(name.value) for name in names}


def wish(tmp_path, *hosts):
    """A request of ward-3, which wishes these hosts."""
    request_node(tmp_path / "node", "ward-3", hosts)
    return (tmp_path / "node/node.csr").read_bytes()


# Certificates


@pytest.mark.parametrize("named", [(), ("--host", HOST), ("--host", "ward-3.example.org")])
def test_a_request_that_names_the_superlinks_host_is_not_signed(folder, tmp_path, named):
    request = wish(tmp_path, HOST)
    result = certs(folder, "sign", "-", *named, stdin=request)
    assert result.exit_code == 1
    assert HOST in result.stderr
    assert not (folder.certificate.parent / "ward-3").exists()


def test_hosts_are_those_that_the_signer_names(folder, tmp_path):
    request = wish(tmp_path, "ward-3.example.org", "10.0.0.3")
    result = certs(folder, "sign", "-", "--host", "ward-3.example.org", stdin=request)
    assert result.exit_code == 1
    assert "names 10.0.0.3 (give --host 10.0.0.3 if you know" in result.stderr
    hosts = ("--host", "ward-3.example.org", "--host", "10.0.0.3", "--host", "ward-3")
    result = certs(folder, "sign", "-", *hosts, stdin=request)
    assert result.exit_code == 0, result.stderr
    certificate = folder.certificate.parent / "ward-3/node.crt"
    assert names_in(certificate) == {"ward-3.example.org", "10.0.0.3", "ward-3"}


@pytest.mark.parametrize("host", ["FL.example.ORG", "10.0.0.1"])
def test_the_superlinks_host_is_never_a_nodes_though_the_signer_names_it(folder, tmp_path, host):
    request = wish(tmp_path)
    with pytest.raises(CertificateError, check=at("host", value=host)):
        folder.sign(request, 5, [host])
    with pytest.raises(CertificateError, check=at("host", value=host)):
        folder.issue_node("ward-3", [host], 5)
    folder.mark_revoked(SERVER)  # which TLS of gRPC does not see
    with pytest.raises(CertificateError, check=at("host", value=host)):
        folder.issue_node("ward-3", [host], 5)
    with pytest.raises(CertificateError, check=at("host", value=HOST)):
        folder.issue_node(HOST, [], 5)  # whose name is its host


def test_a_nodes_host_is_never_the_superlinks(tmp_path):
    authority = CertificateFolder(tmp_path)
    authority.create(30)
    authority.issue_node("ward-3", ["2001:DB8::3"], 5)
    authority.mark_revoked("ward-3")
    with pytest.raises(CertificateError, check=at("host", value="2001:db8:0::3")):
        authority.issue_server([HOST, "2001:db8:0::3"], 5)


SERVER_AUTH, CLIENT_AUTH = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH


@pytest.mark.parametrize("uses", [[SERVER_AUTH], [CLIENT_AUTH]])
def test_a_request_for_another_role_is_refused(folder, tmp_path, uses):
    genuine = x509.load_pem_x509_csr(wish(tmp_path))
    key = new_key()
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject_of("ward-3"))
    for each in genuine.extensions:
        other = isinstance(each.value, x509.ExtendedKeyUsage)
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses) if other else each.value, False)
    request = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    with pytest.raises(CertificateError, match="for another role than a node's"):
        read_request(request)


class Impostor(FleetServicer):
    """Takes a SuperLink's place."""

    def SendNodeHeartbeat(self, request, context):  # noqa: N802 (the name in fleet.proto)
        return SendNodeHeartbeatResponse(success=True)


@contextmanager
def posing_as_superlink(certificate, key):
    """A Fleet API on localhost with these files; its address."""
    server = grpc.server(ThreadPoolExecutor(2))
    add_FleetServicer_to_server(Impostor(), server)
    tls = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
    port = server.add_secure_port("localhost:0", tls)
    server.start()
    yield f"localhost:{port}"
    server.stop(None)


def beats(address, root_certificates):
    """Whether a SuperNode that trusts these gets a word out of it, as at each call."""
    tls = grpc.ssl_channel_credentials(root_certificates.read_bytes())
    with grpc.secure_channel(address, tls) as channel:
        try:
            FleetStub(channel).SendNodeHeartbeat(SendNodeHeartbeatRequest(), timeout=5)
        except grpc.RpcError:
            return False
        return True


def test_no_certificate_of_a_node_is_good_for_the_superlinks_place(folder, tmp_path):
    """Not even one that names its host, as all on one machine do."""
    certificates = folder.certificate.parent
    folder.issue_node("ward-3", ["localhost"], 5)
    folder.issue_node("ward-4", [], 5)
    mole, victim = certificates / "ward-3", certificates / "ward-4"
    with posing_as_superlink(mole / "node.crt", mole / "node.key") as address:
        assert not beats(address, victim / "ca.crt")
        node = subprocess.run(
            [
                *(sys.executable, "-P", "-m", "flwr_distill.command"),
                *("node", "--superlink", address),
                *("--root-certificates", victim / "ca.crt", "--auth-key", victim / "login.key"),
                *("--state-dir", tmp_path / "state", "--connect-timeout", "5"),
            ],
            **{"capture_output": True, "text": True, "timeout": 120, "check": False},
        )
    assert node.returncode == 1
    assert "its certificate is not trusted" in node.stderr
    genuine = certificates / "server"
    with posing_as_superlink(genuine / "server.crt", genuine / "server.key") as address:
        assert beats(address, victim / "ca.crt")


@pytest.mark.parametrize(
    ("who", "stem"), [("server", "server"), ("alice", "user"), ("ward-4", "node")]
)
def test_only_nodes_open_a_connection_to_a_nodes_mailbox(folder, tmp_path, who, stem):
    certificates = folder.certificate.parent
    folder.issue_user("alice", "operator", 5)
    for name in ("ward-3", "ward-4"):
        folder.issue_node(name, ["localhost"], 5)
    own, caller = certificates / "ward-3", certificates / who
    files = {"authority": "nodes-ca.crt", "certificate": "node.crt", "key": "node.key"}
    node_config = {f"peer-{name}": str(own / file) for name, file in files.items()}
    server, port = start_server(Mailbox(tmp_path / "state"), "localhost:0", node_config)
    route = Route(
        **{"sender": "6", "receiver": "7", "purpose": "test", "token": "0" * 32, "largest": 9},
        **{"address": f"localhost:{port}", "permit": "none", "link": "direct"},
        peer_key=b"k" * 32,
    )
    files = ("nodes-ca.crt", f"{who}/{stem}.crt", f"{who}/{stem}.key")
    credentials = Credentials(*((certificates / file).read_bytes() for file in files))
    try:
        # A node gets as far as the mailbox, which asks for the server's permit.
        reason = "refused it" if caller.name == "ward-4" else "no transfer to"
        with pytest.raises(LinkError, match=reason):
            deliver(b"sealed", route, 5, credentials, timeout=10)
    finally:
        server.stop(None)


def test_a_node_says_that_one_authority_for_all_lets_nodes_take_the_superlinks_place(
    folder, monkeypatch
):
    monkeypatch.setattr(CertificateFolder, "_authority_of", lambda self, name, role: self._servers)
    folder.issue_node("ward-4", [], 20)
    own = folder.certificate.parent / "ward-4"
    files = {"peer_certificate": own / "node.crt", "peer_key": own / "node.key"}
    settings = NodeSettings(root_certificates=own / "ca.crt", **files)
    assert "could take its place: use two authorities" in check_peers(settings)


def test_a_node_whose_peers_would_not_take_its_certificate_does_not_start(folder):
    folder.issue_node("ward-3", [], 5)
    own = folder.certificate.parent / "ward-3"
    files = {"peer_certificate": own / "node.crt", "peer_key": own / "node.key"}
    files["root_certificates"] = own / "ca.crt"
    with pytest.raises(NodeError, check=at("root-certificates")) as error:
        check_peers(NodeSettings(**files))
    assert "peer-authority" in error.value.remedy
    with pytest.raises(NodeError, check=at("peer-authority")):
        check_peers(NodeSettings(**files, peer_authority=own / "ca.crt"))


# ServerApps


def compose():
    """The services of compose.yaml with all that goes over it, and the networks of each."""
    services, networks = {}, {}
    for file in ("compose.yaml", "docker/gate.yaml", "docker/monitoring.yaml"):
        for name, service in yaml.safe_load((ROOT / file).read_text())["services"].items():
            services.setdefault(name, service)
            networks.setdefault(name, set()).update(service.get("networks", ()))
    return services, networks


def listens(services, api):
    """Networks on which the SuperLink serves an API, by the name that it listens at."""
    words = services["superlink"]["command"].split()
    host, _, _ = words[words.index(f"--{api}-api-address") + 1].rpartition(":")
    of_superlink = services["superlink"]["networks"]
    if host == "0.0.0.0":
        return set(of_superlink)
    return {name for name, how in of_superlink.items() if host in how.get("aliases", ())}


def test_in_compose_no_serverapp_has_a_route_to_the_control_api():
    services, networks = compose()
    assert listens(services, "control") == {"control"}
    assert listens(services, "serverappio") == {"serverapps"}
    assert networks["serverapp"] == {"serverapps", "monitoring"}
    assert "monitoring" not in networks["superlink"]
    on_theirs = {name for name, on in networks.items() if "serverapps" in on}
    assert on_theirs == {"superlink", "serverapp"}


def test_in_compose_a_serverapp_has_a_folder_and_a_secret_that_no_node_and_no_user_has():
    services, _ = compose()
    holders = {
        volume: {
            name
            for name, service in services.items()
            if any(each.startswith(f"{volume}:") for each in service.get("volumes", ()))
        }
        for volume in ("appio", "./runs", "server", "authority", "superlink")
    }
    assert holders["appio"] == {"prepare", "certs", "superlink", "serverapp"}
    assert holders["./runs"] == {"prepare", "serverapp", "run", "dashboard"}
    for reader in ("run", "dashboard"):  # which show results
        assert "./runs:/runs:ro" in services[reader]["volumes"]
    for secret in ("server", "authority", "superlink"):
        assert "serverapp" not in holders[secret]
