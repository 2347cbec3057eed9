"""`flwr-distill certs`: Flower, TLS and the links take what it issues, and nothing is lost."""

import base64
import dataclasses
import datetime
import json
import os
import ssl
import stat

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from flwr.supercore.primitives.asymmetric import uses_nist_ec_curve
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from flwr_distill.cli.main import app
from flwr_distill.fleet.authority import NODE_USES
from flwr_distill.fleet.certificates import CertificateFolder, Issued
from flwr_distill.fleet.node_request import _LOGIN_KEY
from flwr_distill.links.credentials import Credentials, name_of
from flwr_distill.links.errors import LinkError
from flwr_distill.links.records import Peered

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


def test_nodes_meet_over_mutual_tls_with_the_files_they_get(issued):
    trusted = issued / "node-0/nodes-ca.crt"
    listener = serving(issued / "node-0/node.crt", issued / "node-0/node.key", trusted)
    caller = ssl.create_default_context(cafile=issued / "node-1/nodes-ca.crt")
    with pytest.raises(ssl.SSLError, match="peer did not return a certificate"):
        handshake(listener, caller, "node-0")
    caller.load_cert_chain(issued / "node-1/node.crt", issued / "node-1/node.key")
    handshake(listener, caller, "node-0")


def test_a_node_logs_in_with_a_key_of_flowers_format_that_apps_never_need(issued):
    key = serialization.load_ssh_private_key((issued / "node-0/login.key").read_bytes(), None)
    public = serialization.load_ssh_public_key((issued / "node-0/login.pub").read_bytes())
    certificate = x509.load_pem_x509_certificate((issued / "node-0/node.crt").read_bytes())
    assert uses_nist_ec_curve(public)
    assert key.public_key() == public != certificate.public_key()
    (registered,) = [
        each.registered_key for each in CertificateFolder(issued).issued() if each.name == "node-0"
    ]
    assert serialization.load_ssh_public_key(registered.encode()) == public


def test_a_renewed_certificate_leaves_the_login_as_it_is(folder):
    authority = CertificateFolder(folder)
    first = authority.issue_node("node-0", [], 5)
    again = authority.renew("node-0", 9)
    assert again.registered_key == first.registered_key
    assert again.public_key == first.public_key != first.registered_key


def test_nodes_that_earlier_versions_registered_with_their_only_key_stay_known():
    fields = {"name": "node-0", "hosts": [], "serial": "1", "expires": "2030-01-01"}
    assert Issued(**fields, public_key="ecdsa one").registered_key == "ecdsa one"


def test_a_request_with_one_key_for_both_is_refused(folder, tmp_path, monkeypatch):
    key = ec.generate_private_key(ec.SECP256R1())
    monkeypatch.setattr("flwr_distill.fleet.node_request.new_key", lambda: key)
    own = tmp_path / "on-the-node"
    assert certs("request", "ward-3", "--dir", str(own)).exit_code == 0
    told = certs("sign", str(own / "node.csr"), "--dir", str(folder))
    assert "two keys must differ" in told.stderr


def credentials(issued, name, stem="node"):
    own = issued / name
    files = (issued / "nodes-ca.crt", own / f"{stem}.crt", own / f"{stem}.key")
    return Credentials(*(file.read_bytes() for file in files))


def waybill(of):
    return Peered(
        **{"sender": "6", "receiver": "7", "purpose": "test", "token": "0" * 32},
        peer_key=b"k" * 32,
        peer_name=name_of(of.certificate),
        peer_certificate=of.certificate,
        peer_signature=of.sign(b"k" * 32, 5, 7),
    )


def test_a_nodes_certificate_vouches_for_its_keys_and_the_servers_for_nobodys(issued):
    judge = credentials(issued, "node-0")
    judge.check_peer(waybill(credentials(issued, "node-1")), 5, "7")
    with pytest.raises(LinkError, match="not signed with a certificate of the federation"):
        judge.check_peer(waybill(credentials(issued, "server", "server")), 5, "7")
    both = (issued / "ca.crt").read_bytes() + judge.authority
    judge = dataclasses.replace(judge, authority=both)
    with pytest.raises(LinkError, match="not for client and server authentication"):
        judge.check_peer(waybill(credentials(issued, "server", "server")), 5, "7")


@pytest.fixture
def asked(folder, tmp_path):
    """A node's folder with its key and request, and what the command printed."""
    own = tmp_path / "on-the-node"
    told = certs("request", "ward-3", "--host", "10.0.0.3", "--dir", str(own))
    assert told.exit_code == 0, told.output
    return own, told.stdout


def test_a_node_keeps_its_key_and_gets_a_certificate_that_vouches_for_it(folder, asked):
    own, told = asked
    fingerprint = told.split()[-1]
    told = certs(
        *("sign", str(own / "node.csr"), "--dir", str(folder)),
        *("--host", "10.0.0.3", "--fingerprint", fingerprint),
    )
    assert told.exit_code == 0, told.output
    assert told.stdout.split()[-1] == fingerprint
    (signed,) = CertificateFolder(folder).issued()
    assert signed.days_left == 30
    assert {file.name for file in (folder / "ward-3").iterdir()} == {
        *("ca.crt", "nodes-ca.crt", "node.crt", "login.pub")
    }
    assert (folder / "ward-3/login.pub").read_bytes() == (own / "login.pub").read_bytes()
    for file in ("nodes-ca.crt", "node.crt"):
        (own / file).write_bytes((folder / "ward-3" / file).read_bytes())
    files = ("nodes-ca.crt", "node.crt", "node.key")
    node = Credentials(*((own / file).read_bytes() for file in files))
    node.check_peer(waybill(node), 5, "7")
    listener = serving(own / "node.crt", own / "node.key", own / "nodes-ca.crt")
    caller = ssl.create_default_context(cafile=own / "nodes-ca.crt")
    caller.load_cert_chain(own / "node.crt", own / "node.key")
    handshake(listener, caller, "10.0.0.3")
    assert stat.S_IMODE((own / "node.key").stat().st_mode) == 0o600


def test_of_a_request_name_and_keys_are_granted_and_nothing_else(folder):
    key = ec.generate_private_key(ec.SECP256R1())
    operator = x509.NameAttribute(
        NameOID.ORGANIZATIONAL_UNIT_NAME, "operator"
    )  # a role at the gate
    own_name = x509.NameAttribute(NameOID.COMMON_NAME, "ward-3")
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([own_name, operator]))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("ward-3")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(NODE_USES, critical=False)
        .add_extension(login_key(), critical=False)
        .sign(key, hashes.SHA256())
    )
    CertificateFolder(folder).sign(request.public_bytes(serialization.Encoding.PEM), 5)
    made = x509.load_pem_x509_certificate((folder / "ward-3/node.crt").read_bytes())
    assert not made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert made.public_key() == key.public_key()
    assert list(made.subject) == [own_name]


def login_key():
    """The extension of a request with the key for the login."""
    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    encoded = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return x509.UnrecognizedExtension(_LOGIN_KEY, encoded)


def csr(key, name="ward-3", host="ward-3"):
    builder = x509.CertificateSigningRequestBuilder()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    alternative = x509.SubjectAlternativeName([x509.DNSName(host)])
    request = builder.subject_name(subject).add_extension(alternative, critical=False)
    request = request.add_extension(login_key(), critical=False)
    request = request.add_extension(NODE_USES, critical=False)
    return request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def changed(content):
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    ("request_of", "complaint"),
    [
        (lambda key: b"\0" * 100_000, "not a request of"),
        (lambda key: changed(csr(key)), "not signed with its key"),
        (lambda key: csr(rsa.generate_private_key(65537, 2048)), "P-256, P-384 or P-521"),
        (lambda key: csr(key, name="server"), "name = 'server'"),
        (lambda key: csr(key, name="../node-0"), "name = '../node-0'"),
        (lambda key: csr(key, host="*.example.org"), "host = '*.example.org'"),
    ],
)
def test_a_request_that_is_not_as_it_should_be_is_refused(folder, request_of, complaint):
    der = request_of(ec.generate_private_key(ec.SECP384R1()))
    pem = b"-----BEGIN CERTIFICATE REQUEST-----\n" + base64.encodebytes(der)
    pem += b"-----END CERTIFICATE REQUEST-----\n"
    told = CliRunner().invoke(app, ["certs", "sign", "-", "--dir", str(folder)], input=pem)
    assert told.exit_code == 1
    assert complaint in told.stderr
    assert told.stderr.count("\n") == 1
    assert CertificateFolder(folder).issued() == []


def test_what_a_node_signed_holds_for_the_name_in_its_certificate_alone(folder):
    """One key that is certified under two names: the server hands out the other certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    authority, named = CertificateFolder(folder), {}
    for name in ("ward-3", "ward-4"):
        request = x509.load_der_x509_csr(csr(key, name))
        authority.sign(request.public_bytes(serialization.Encoding.PEM), 5, ["ward-3"])
        certificate = (folder / name / "node.crt").read_bytes()
        named[name] = Credentials((folder / "nodes-ca.crt").read_bytes(), certificate, private)
    own, other = named.values()
    own.check_peer(waybill(own), 5, "7")
    others = {"peer_name": "ward-4", "peer_certificate": other.certificate}
    with pytest.raises(LinkError, match="wrong signature"):
        own.check_peer(waybill(own).model_copy(update=others), 5, "7")


def test_another_key_than_the_one_whose_fingerprint_was_told_is_refused(folder, asked):
    told = certs(
        *("sign", str(asked[0] / "node.csr"), "--dir", str(folder)), *("--fingerprint", "SHA256:x")
    )
    assert told.exit_code == 1
    assert "fingerprint = 'SHA256:x': the request's key has SHA256:" in told.stderr


def test_a_renewed_certificate_has_the_same_key_and_both_are_revoked_with_the_name(folder):
    authority = CertificateFolder(folder)
    first = authority.issue_node("node-0", ["10.0.0.3"], 5)
    before = waybill(credentials(folder, "node-0"))
    assert certs("renew", "node-0", "--days", "30", "--dir", str(folder)).exit_code == 0
    second = authority.valid("node-0")
    assert (second.public_key, second.hosts) == (first.public_key, first.hosts)
    assert second.serial != first.serial
    assert second.days_left == 30
    own = credentials(folder, "node-0")
    authority.mark_revoked("node-0")
    informed = dataclasses.replace(own, revocations=authority.nodes_revocations.read_bytes())
    for of in (before, waybill(own)):
        own.check_peer(of, 5, "7")
        with pytest.raises(LinkError, match="is node-0, whose certificate is revoked"):
            informed.check_peer(of, 5, "7")


def test_keep_renews_what_is_about_to_expire(folder):
    CertificateFolder(folder).issue_node("node-0", [], 5)
    told = certs("node", "node-0", "--keep", "--dir", str(folder))
    assert told.exit_code == 0, told.output
    assert [each.days_left for each in CertificateFolder(folder).issued()] == [5, 30]


@pytest.mark.parametrize("content", [b"", b"junk", "another authority's"])
def test_a_revocation_list_that_is_not_the_authoritys_is_refused(folder, tmp_path, content):
    CertificateFolder(folder).issue_node("node-0", [], 5)
    if isinstance(content, str):
        CertificateFolder(tmp_path / "other").create(10)
        content = (tmp_path / "other/nodes-ca.crl").read_bytes()
    own = credentials(folder, "node-0")
    informed = dataclasses.replace(own, revocations=content or b" ")
    with pytest.raises(LinkError, match="peer-revocations is no"):
        informed.check_peer(waybill(own), 5, "7")


def test_keys_are_for_their_owner_only_whatever_the_umask(issued):
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in issued.rglob("*.key")}
    keys = ("ca.key", "nodes-ca.key", "server.key", "node.key", "login.key")
    assert modes == dict.fromkeys(keys, 0o600)


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
        ("nodes-ca.key", ("init",)),
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
    assert f"{tmp_path / file}: exists" in result.stderr
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_name_is_issued_once_until_it_is_revoked_and_its_files_are_moved_away(folder):
    authority = CertificateFolder(folder)
    first = authority.issue_node("node-0", [], 5)
    result = certs("node", "node-0", "--dir", str(folder))
    assert result.exit_code == 1
    assert "certs revoke node-0" in result.stderr
    authority.mark_revoked("node-0")
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
        (("node", "Node_0"), "name = 'Node_0'"),
        (("node", "../node"), "name = '../node'"),
        (("node", "server"), "name = 'server'"),
        (("node", "node-0", "--host", "node-0:9200"), "host = 'node-0:9200'"),
        (("server", "--host", "10.0.0.256"), "host = '10.0.0.256'"),
        (("server", "--host", ""), "host = ''"),
        (("server", "--host", "a", "--days", "4000"), "days = 4000"),
    ],
)
def test_bad_input_is_refused_in_one_line_and_leaves_nothing(folder, arguments, complaint):
    result = certs(*arguments, "--dir", str(folder))
    assert result.exit_code == 1
    assert complaint in result.stderr
    assert result.stderr.count("\n") == 1
    made = {f"{name}.{kind}" for name in ("ca", "nodes-ca") for kind in ("crt", "key", "crl")}
    assert {path.name for path in folder.iterdir()} == {*made, "issued.json"}


def test_a_folder_without_an_authority_is_said_with_the_remedy(tmp_path):
    for command in (("server", "--host", "a"), ("node", "node-0"), ("list",), ("revoke", "x")):
        result = certs(*command, "--dir", str(tmp_path))
        assert result.exit_code == 1
        assert "flwr-distill certs init" in result.stderr


def test_list_shows_names_hosts_ends_and_revocations(folder):
    authority = CertificateFolder(folder)
    authority.issue_server(["superlink", "10.0.0.1"], 5)
    authority.issue_node("ward-3", [], 5)
    authority.mark_revoked("ward-3")
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
    assert "node-0 is not revoked: superlink = '127.0.0.1:9': no SuperLink answers" in result.stderr
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
