"""`flwr-distill certs`: Flower, TLS and the links take what it issues, and nothing is lost."""

import datetime
import json
import os
import ssl
import stat

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from flwr.supercore.primitives.asymmetric import uses_nist_ec_curve
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from cli.main import app
from fleet.certificates import CertificateFolder
from links.credentials import Credentials
from links.errors import LinkError
from links.records import Peered

TODAY = datetime.datetime.now(datetime.UTC).date()


def certs(*arguments):
    return CliRunner().invoke(app, ["certs", *arguments])


@pytest.fixture(scope="module")
def issued(tmp_path_factory):
    """A folder with an authority, a server and two nodes."""
    folder = tmp_path_factory.mktemp("federation")
    where = ("--dir", str(folder))
    old = os.umask(0)
    try:
        for command in (
            ("init",),
            ("server", "--host", "superlink", "--host", "10.1.2.3"),
            ("node", "node-0"),
            ("node", "node-1", "--host", "127.0.0.1", "--days", "30"),
        ):
            result = certs(*command, *where)
            assert result.exit_code == 0, result.output
    finally:
        os.umask(old)
    return folder


@pytest.fixture
def folder(tmp_path):
    """A folder with an authority alone."""
    assert certs("init", "--dir", str(tmp_path)).exit_code == 0
    return tmp_path


def handshake(server_side, client_side, host):
    """Run a TLS handshake in memory; raises where either side refuses the other."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_side.wrap_bio(to_server, to_client, server_side=True)
    client = client_side.wrap_bio(to_client, to_server, server_hostname=host)
    for _ in range(4):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    server.do_handshake()
    client.do_handshake()


def serving(certificate, key, clients_from=None):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    if clients_from:
        context.load_verify_locations(clients_from)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


@pytest.mark.parametrize("host", ["superlink", "10.1.2.3"])
def test_the_servers_certificate_is_good_for_its_hosts(issued, host):
    server = serving(issued / "server/server.crt", issued / "server/server.key")
    handshake(server, ssl.create_default_context(cafile=issued / "ca.crt"), host)


@pytest.mark.parametrize("host", ["elsewhere", "10.1.2.4", "super.superlink"])
def test_the_servers_certificate_is_good_for_no_other_host(issued, host):
    server = serving(issued / "server/server.crt", issued / "server/server.key")
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        handshake(server, ssl.create_default_context(cafile=issued / "ca.crt"), host)


def test_nodes_meet_over_mutual_tls_with_the_three_files_they_get(issued):
    listener = serving(
        issued / "node-0/node.crt", issued / "node-0/node.key", issued / "node-0/ca.crt"
    )
    caller = ssl.create_default_context(cafile=issued / "node-1/ca.crt")
    with pytest.raises(ssl.SSLError, match="peer did not return a certificate"):
        handshake(listener, caller, "node-0")
    caller.load_cert_chain(issued / "node-1/node.crt", issued / "node-1/node.key")
    handshake(listener, caller, "node-0")


def test_a_nodes_key_is_one_that_flower_logs_in_with(issued):
    key = serialization.load_ssh_private_key((issued / "node-0/node.key").read_bytes(), None)
    public = serialization.load_ssh_public_key((issued / "node-0/node.pub").read_bytes())
    certificate = x509.load_pem_x509_certificate((issued / "node-0/node.crt").read_bytes())
    assert uses_nist_ec_curve(public)
    assert key.public_key() == public == certificate.public_key()


def credentials(issued, name, stem="node"):
    files = (issued / "ca.crt", issued / f"{name}/{stem}.crt", issued / f"{name}/{stem}.key")
    return Credentials(*(file.read_bytes() for file in files))


def waybill(of):
    signature = of.sign(b"k" * 32, 5, 7)
    names = {"sender": "6", "receiver": "7", "purpose": "test", "token": "0" * 32}
    return Peered(
        **names, peer_key=b"k" * 32, peer_certificate=of.certificate, peer_signature=signature
    )


def test_a_nodes_certificate_vouches_for_its_keys_and_the_servers_for_nobodys(issued):
    judge = credentials(issued, "node-0")
    judge.check_peer(waybill(credentials(issued, "node-1")), 5, "7")
    with pytest.raises(LinkError, match="not for client authentication"):
        judge.check_peer(waybill(credentials(issued, "server", "server")), 5, "7")


def test_keys_are_for_their_owner_only_whatever_the_umask(issued):
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in issued.rglob("*.key")}
    assert modes == {"ca.key": 0o600, "server.key": 0o600, "node.key": 0o600}


def test_certificates_expire_when_asked(issued):
    for name, days in (("server/server.crt", 365), ("node-1/node.crt", 30), ("ca.crt", 3650)):
        certificate = x509.load_pem_x509_certificate((issued / name).read_bytes())
        lasts = certificate.not_valid_after_utc.date() - TODAY
        assert datetime.timedelta(days - 1) <= lasts <= datetime.timedelta(days + 1)


@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("ca.key", ("init",)),
        ("ca.crt", ("init",)),
        ("issued.json", ("init",)),
        ("server/server.key", ("server", "--host", "a")),
        ("node-0/node.key", ("node", "node-0")),
        ("node-0/node.crt", ("node", "node-0")),
    ],
)
def test_what_is_there_is_never_overwritten(tmp_path, file, command):
    if command != ("init",):
        assert certs("init", "--dir", str(tmp_path)).exit_code == 0
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    result = certs(*command, "--dir", str(tmp_path))
    assert result.exit_code == 1
    assert f"{tmp_path / file} exists" in result.stderr
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_name_is_issued_once_until_it_is_revoked_and_its_files_are_moved_away(folder):
    authority = CertificateFolder(folder)
    first = authority.issue_node("node-0", [], 5)
    result = certs("node", "node-0", "--dir", str(folder))
    assert result.exit_code == 1
    assert "certs revoke node-0" in result.stderr
    authority.mark_revoked(first)
    (folder / "node-0").rename(folder / "old")
    second = authority.issue_node("node-0", [], 5)
    assert second.public_key != first.public_key
    assert [line.revoked for line in authority.issued()] == [TODAY.isoformat(), None]
    assert authority.valid("node-0") == second


def test_keep_leaves_what_is_there_as_it_is(issued):
    before = {path: path.read_bytes() for path in issued.rglob("*") if path.is_file()}
    for command in (("init",), ("server", "--host", "other"), ("node", "node-0")):
        result = certs(*command, "--keep", "--dir", str(issued))
        assert result.exit_code == 0, result.output
        assert "is kept" in result.stdout
    assert {path: path.read_bytes() for path in issued.rglob("*") if path.is_file()} == before


def test_keep_issues_what_is_not_there(folder):
    result = certs("node", "node-0", "--keep", "--dir", str(folder))
    assert result.exit_code == 0, result.output
    assert (folder / "node-0/node.key").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("node", "Node_0"), "name=Node_0"),
        (("node", "../node"), "name=../node"),
        (("node", "server"), "name=server"),
        (("node", "node-0", "--host", "node-0:9200"), "host=node-0:9200"),
        (("server", "--host", "10.0.0.256"), "host=10.0.0.256"),
        (("server", "--host", ""), "host="),
        (("server", "--host", "a", "--days", "4000"), "days=4000"),
    ],
)
def test_bad_input_is_refused_in_one_line_and_leaves_nothing(folder, arguments, complaint):
    result = certs(*arguments, "--dir", str(folder))
    assert result.exit_code == 1
    assert complaint in result.stderr
    assert result.stderr.count("\n") == 1
    assert {path.name for path in folder.iterdir()} == {"ca.crt", "ca.key", "issued.json"}


def test_a_folder_without_an_authority_is_said_with_the_remedy(tmp_path):
    for command in (("server", "--host", "a"), ("node", "node-0"), ("list",), ("revoke", "x")):
        result = certs(*command, "--dir", str(tmp_path))
        assert result.exit_code == 1
        assert "flwr-distill certs init" in result.stderr


def test_list_shows_names_hosts_ends_and_revocations(folder):
    authority = CertificateFolder(folder)
    authority.issue_server(["superlink", "10.0.0.1"], 5)
    authority.mark_revoked(authority.issue_node("ward-3", [], 5))
    lines = certs("list", "--dir", str(folder)).stdout.splitlines()
    (server,) = (line for line in lines if "server" in line)
    (node,) = (line for line in lines if "ward-3" in line)
    end = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(5)).date().isoformat()
    assert "superlink 10.0.0.1" in server
    assert end in server
    assert TODAY.isoformat() not in server
    assert TODAY.isoformat() in node


def test_the_servers_certificate_can_be_revoked_without_a_superlink(folder):
    CertificateFolder(folder).issue_server(["a"], 5)
    assert certs("revoke", "server", "--dir", str(folder)).exit_code == 0
    again = certs("revoke", "server", "--dir", str(folder))
    assert again.exit_code == 1
    assert "revoked already" in again.stderr


def test_a_node_is_not_marked_as_revoked_if_the_superlink_was_not_told(folder):
    CertificateFolder(folder).issue_node("node-0", [], 5)
    result = certs(
        *("revoke", "node-0", "--dir", str(folder)),
        *("--superlink", "127.0.0.1:9", "--timeout", "0"),
    )
    assert result.exit_code == 1
    assert "node-0 is not revoked: no SuperLink answers at superlink=127.0.0.1:9" in result.stderr
    assert json.loads((folder / "issued.json").read_text())[0]["revoked"] is None


@given(address=st.ip_addresses())
@settings(max_examples=20, deadline=None)
def test_any_address_can_be_a_host(tmp_path_factory, address):
    folder = tmp_path_factory.mktemp("authority")
    authority = CertificateFolder(folder)
    authority.create(10)
    authority.issue_server([str(address)], 5)
    certificate = x509.load_pem_x509_certificate((folder / "server/server.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.IPAddress) == [address]
