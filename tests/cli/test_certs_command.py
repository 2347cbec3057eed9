"""`flwr-distill certs`: Flower, TLS and the links take what it issues, and nothing is lost."""

import base64
import dataclasses
import datetime
import json
import os
import ssl
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from flwr.supercore.primitives.asymmetric import uses_nist_ec_curve

from flwr_distill.fleet import certificates
from flwr_distill.fleet.authority import NODE_USES, CertificateError
from flwr_distill.fleet.certificates import CertificateFolder
from flwr_distill.fleet.node_request import _LOGIN_KEY
from flwr_distill.links.credentials import Credentials, name_of
from flwr_distill.links.errors import LinkError
from flwr_distill.links.records import Peered

from .commands import assert_refused, command

HOSTS = ("superlink", "10.1.2.3", "2001:db8::1")
TODAY = datetime.datetime.now(datetime.UTC).date()


def certs(*arguments):
    return command("certs", *arguments)


@pytest.fixture(scope="module")
def issued(tmp_path_factory):
    """A folder with an authority, a server and two nodes."""
    folder = tmp_path_factory.mktemp("federation")
    where = ("--dir", folder)
    old = os.umask(0)
    try:
        for words in (
            ("init",),
            ("server", *(word for host in HOSTS for word in ("--host", host))),
            ("node", "node-0"),
            ("node", "node-1", "--host", "127.0.0.1", "--days", "30"),
        ):
            result = certs(*words, *where)
            assert result.exit_code == 0, result.output
    finally:
        os.umask(old)
    return folder


@pytest.fixture
def folder(tmp_path):
    """A folder with an authority alone."""
    assert certs("init", "--dir", tmp_path).exit_code == 0
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


def test_the_servers_certificate_is_good_for_its_hosts_alone(issued):
    server = serving(issued / "server/server.crt", issued / "server/server.key")
    trusting = ssl.create_default_context(cafile=issued / "ca.crt")
    for host in HOSTS:
        handshake(server, trusting, host)
    for host in ("elsewhere", "10.1.2.4", "super.superlink", "2001:db8::2"):
        with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
            handshake(server, trusting, host)


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
        each.login_key for each in CertificateFolder(issued).issued() if each.name == "node-0"
    ]
    assert serialization.load_ssh_public_key(registered.encode()) == public


def test_a_request_with_one_key_for_both_is_refused(folder, tmp_path, monkeypatch):
    key = ec.generate_private_key(ec.SECP256R1())
    monkeypatch.setattr("flwr_distill.fleet.node_request.new_key", lambda: key)
    own = tmp_path / "on-the-node"
    assert certs("request", "ward-3", "--dir", own).exit_code == 0
    reply = certs("sign", own / "node.csr", "--dir", folder)
    assert "keys" in reply.stderr


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
    with pytest.raises(LinkError, match="signed"):
        judge.check_peer(waybill(credentials(issued, "server", "server")), 5, "7")
    both = (issued / "ca.crt").read_bytes() + judge.authority
    judge = dataclasses.replace(judge, authority=both)
    with pytest.raises(LinkError, match="authentication"):
        judge.check_peer(waybill(credentials(issued, "server", "server")), 5, "7")


@pytest.fixture
def requests(folder, tmp_path):
    """A node's folder with its key and request, and what the command printed."""
    own = tmp_path / "on-the-node"
    reply = certs("request", "ward-3", "--host", "10.0.0.3", "--dir", own)
    assert reply.exit_code == 0, reply.output
    return own, reply.stdout


def test_a_node_keeps_its_key_and_gets_a_certificate_that_vouches_for_it(folder, requests):
    own, reply = requests
    fingerprint = reply.split()[-1]
    reply = certs(
        *("sign", own / "node.csr", "--dir", folder),
        *("--host", "10.0.0.3", "--fingerprint", fingerprint),
    )
    assert reply.exit_code == 0, reply.output
    assert reply.stdout.split()[-1] == fingerprint
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


def csr(key, name="ward-3", host="ward-3", attributes=(), extensions=()):
    """A request, signed, with the key for the login."""
    login = ec.generate_private_key(ec.SECP256R1()).public_key()
    openssh = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    own_name = x509.NameAttribute(NameOID.COMMON_NAME, name)
    request = x509.CertificateSigningRequestBuilder(x509.Name([own_name, *attributes]))
    for extension in (
        *(x509.SubjectAlternativeName([x509.DNSName(host)]), NODE_USES, *extensions),
        x509.UnrecognizedExtension(_LOGIN_KEY, login.public_bytes(*openssh)),
    ):
        request = request.add_extension(extension, critical=False)
    return request.sign(key, hashes.SHA256())


def test_of_a_request_name_and_keys_are_granted_and_nothing_else(folder):
    key = ec.generate_private_key(ec.SECP256R1())
    role = x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, "operator")  # at the gate
    authority = x509.BasicConstraints(ca=True, path_length=None)
    request = csr(key, attributes=[role], extensions=[authority])
    CertificateFolder(folder).sign(request.public_bytes(serialization.Encoding.PEM), 5)
    created = x509.load_pem_x509_certificate((folder / "ward-3/node.crt").read_bytes())
    assert not created.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert created.public_key() == key.public_key()
    assert list(created.subject) == [x509.NameAttribute(NameOID.COMMON_NAME, "ward-3")]


def der(*arguments, **named):
    return csr(*arguments, **named).public_bytes(serialization.Encoding.DER)


def changed(content):
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    ("request_of", "complaint"),
    [
        (lambda key: b"\0" * 100_000, "request"),
        (lambda key: changed(der(key)), "signed"),
        (lambda key: der(rsa.generate_private_key(65537, 2048)), "P-256"),
        (lambda key: der(key, name="server"), "server"),
        (lambda key: der(key, name="../node-0"), "../node-0"),
        (lambda key: der(key, host="*.example.org"), "*.example.org"),
    ],
)
def test_a_request_that_is_not_as_it_should_be_is_refused(folder, request_of, complaint):
    content = request_of(ec.generate_private_key(ec.SECP384R1()))
    pem = b"-----BEGIN CERTIFICATE REQUEST-----\n" + base64.encodebytes(content)
    pem += b"-----END CERTIFICATE REQUEST-----\n"
    assert_refused(command("certs", "sign", "-", "--dir", folder, input=pem), complaint)
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
        authority.sign(csr(key, name).public_bytes(serialization.Encoding.PEM), 5, ["ward-3"])
        certificate = (folder / name / "node.crt").read_bytes()
        named[name] = Credentials((folder / "nodes-ca.crt").read_bytes(), certificate, private)
    own, other = named.values()
    own.check_peer(waybill(own), 5, "7")
    others = {"peer_name": "ward-4", "peer_certificate": other.certificate}
    with pytest.raises(LinkError, match="signature"):
        own.check_peer(waybill(own).model_copy(update=others), 5, "7")


def test_another_key_than_the_one_whose_fingerprint_was_told_is_refused(folder, requests):
    reply = certs(
        *("sign", str(requests[0] / "node.csr"), "--dir", folder), *("--fingerprint", "SHA256:x")
    )
    assert_refused(reply, "SHA256:x")


def test_a_renewed_certificate_has_the_same_key_and_both_are_revoked_with_the_name(folder):
    authority = CertificateFolder(folder)
    first = authority.issue_node("node-0", ["10.0.0.3"], 5)
    before = waybill(credentials(folder, "node-0"))
    assert certs("renew", "node-0", "--days", "30", "--dir", folder).exit_code == 0
    second = authority.valid("node-0")
    assert (second.public_key, second.hosts) == (first.public_key, first.hosts)
    assert second.login_key == first.login_key != first.public_key
    assert second.serial != first.serial
    assert second.days_left == 30
    own = credentials(folder, "node-0")
    authority.mark_revoked("node-0")
    informed = dataclasses.replace(own, revocations=authority.nodes_revocations.read_bytes())
    for of in (before, waybill(own)):
        own.check_peer(of, 5, "7")
        with pytest.raises(LinkError, match="revoked"):
            informed.check_peer(of, 5, "7")


def test_keep_renews_what_is_about_to_expire(folder):
    CertificateFolder(folder).issue_node("node-0", [], 5)
    reply = certs("node", "node-0", "--keep", "--dir", folder)
    assert reply.exit_code == 0, reply.output
    assert [each.days_left for each in CertificateFolder(folder).issued()] == [5, 30]


@pytest.mark.parametrize("content", [b"", b"junk", "another authority's"])
def test_a_revocation_list_that_is_not_the_authoritys_is_refused(folder, tmp_path, content):
    CertificateFolder(folder).issue_node("node-0", [], 5)
    if isinstance(content, str):
        CertificateFolder(tmp_path / "other").create(10)
        content = (tmp_path / "other/nodes-ca.crl").read_bytes()
    own = credentials(folder, "node-0")
    informed = dataclasses.replace(own, revocations=content or b" ")
    with pytest.raises(LinkError, match="peer-revocations"):
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
    ("file", "words"),
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
def test_what_is_there_is_never_overwritten(tmp_path, file, words):
    if words != ("init",):
        assert certs("init", "--dir", tmp_path).exit_code == 0
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert_refused(certs(*words, "--dir", tmp_path), tmp_path / file)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_name_is_issued_once_until_it_is_revoked_and_its_files_are_moved_away(folder):
    authority = CertificateFolder(folder)
    first = authority.issue_node("node-0", [], 5)
    assert_refused(certs("node", "node-0", "--dir", folder), "certs revoke node-0")
    authority.mark_revoked("node-0")
    (folder / "node-0").rename(folder / "old")
    second = authority.issue_node("node-0", [], 5)
    assert second.public_key != first.public_key
    assert [line.revoked for line in authority.issued()] == [TODAY.isoformat(), None]
    assert authority.valid("node-0") == second


def test_keep_leaves_existing_files_unchanged_and_issues_missing_ones(issued, tmp_path):
    before = {path: path.read_bytes() for path in issued.rglob("*") if path.is_file()}
    for words in (("init",), ("server", "--host", "other"), ("node", "node-0")):
        result = certs(*words, "--keep", "--dir", issued)
        assert result.exit_code == 0, result.output
        assert "is kept" in result.stdout
    assert {path: path.read_bytes() for path in issued.rglob("*") if path.is_file()} == before
    for words in (("init",), ("node", "node-0")):
        assert certs(*words, "--keep", "--dir", tmp_path).exit_code == 0
    assert (tmp_path / "node-0/node.key").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("node", "Node_0"), "Node_0"),
        (("node", "../node"), "../node"),
        (("node", "server"), "server"),
        (("node", "node-0", "--host", "node-0:9200"), "node-0:9200"),
        (("server", "--host", "10.0.0.256"), "10.0.0.256"),
        (("server", "--host", ""), "host"),
        (("server", "--host", "a", "--days", "4000"), "4000"),
    ],
)
def test_bad_input_is_refused_in_one_line_and_leaves_nothing(folder, arguments, complaint):
    assert_refused(certs(*arguments, "--dir", folder), complaint)
    created = {f"{name}.{kind}" for name in ("ca", "nodes-ca") for kind in ("crt", "key", "crl")}
    assert {path.name for path in folder.iterdir()} == {*created, "issued.json"}


def test_a_folder_without_an_authority_is_said_with_the_remedy(tmp_path):
    for words in (("server", "--host", "a"), ("node", "node-0"), ("list",), ("revoke", "x")):
        assert_refused(certs(*words, "--dir", tmp_path), "flwr-distill certs init")


def test_list_shows_names_hosts_ends_and_revocations(folder):
    authority = CertificateFolder(folder)
    authority.issue_server(["superlink", "10.0.0.1"], 5)
    authority.issue_node("ward-3", [], 5)
    authority.mark_revoked("ward-3")
    lines = certs("list", "--dir", folder).stdout.splitlines()
    (server,) = (line for line in lines if "server" in line)
    (node,) = (line for line in lines if "ward-3" in line)
    end = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(5)).date().isoformat()
    assert "superlink 10.0.0.1" in server
    assert end in server
    assert TODAY.isoformat() not in server
    assert TODAY.isoformat() in node


def test_of_commands_at_once_none_loses_what_another_has_written(folder):
    """A node's revocation, above all."""
    CertificateFolder(folder).issue_node("ward-0", [], 30)
    names = [f"ward-{number}" for number in range(1, 9)]

    def issue(name):
        CertificateFolder(folder).issue_node(name, [], 30)

    with ThreadPoolExecutor() as pool:
        issuing = [pool.submit(issue, name) for name in names]
        CertificateFolder(folder).mark_revoked("ward-0")
        for each in issuing:
            each.result()
    issued = CertificateFolder(folder).issued()
    assert {each.name for each in issued} == {"ward-0", *names}
    assert [each.name for each in issued if each.revoked] == ["ward-0"]


def test_a_folder_that_stays_locked_is_an_error(folder, monkeypatch):
    authority = CertificateFolder(folder)
    monkeypatch.setattr(certificates, "LOCK_TIMEOUT", 0.1)
    with authority._locked(), pytest.raises(CertificateError, match=r"has locked it.*end it"):
        CertificateFolder(folder).issue_node("ward-1", [], 30)
    CertificateFolder(folder).issue_node("ward-1", [], 30)


def test_a_renewed_certificate_that_was_not_written_can_be_revoked(folder, monkeypatch):
    authority = CertificateFolder(folder)
    authority.issue_node("ward-0", [], 30)
    entry, _ = authority._signed(authority.valid("ward-0"), 30)
    monkeypatch.setattr(authority, "_signed", lambda *_: (entry, {"no/such/folder": b""}))
    with pytest.raises(FileNotFoundError):
        authority.renew("ward-0", 30)
    assert authority.valid("ward-0") == entry


def test_a_certificate_exists_only_where_it_can_be_revoked(folder, monkeypatch):
    authority = CertificateFolder(folder)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(authority, "_save", killed)
    with pytest.raises(KeyboardInterrupt):
        authority.issue_node("ward-0", [], 30)
    assert not list((folder / "ward-0").glob("*node.crt"))


def test_a_revocation_that_broke_off_can_be_repeated(folder, monkeypatch):
    authority = CertificateFolder(folder)
    serial = int(authority.issue_node("ward-0", [], 30).serial, 16)

    def broken(*_):
        raise OSError("no space left")

    for step in ("_write_revocations", "_save"):
        with monkeypatch.context() as patched:
            patched.setattr(CertificateFolder, step, broken)
            with pytest.raises(OSError, match="no space"):
                authority.mark_revoked("ward-0")
        assert authority.valid("ward-0")
    authority.mark_revoked("ward-0")
    revoked = x509.load_pem_x509_crl(authority.nodes_revocations.read_bytes())
    assert revoked.get_revoked_certificate_by_serial_number(serial) is not None


def test_the_servers_certificate_can_be_revoked_without_a_superlink(folder):
    CertificateFolder(folder).issue_server(["a"], 5)
    assert certs("revoke", "server", "--dir", folder).exit_code == 0
    assert_refused(certs("revoke", "server", "--dir", folder), "revoked it already")


def test_a_node_is_not_marked_as_revoked_if_the_superlink_was_not_told(folder):
    CertificateFolder(folder).issue_node("node-0", [], 5)
    result = certs(
        *("revoke", "node-0", "--dir", folder),
        *("--superlink", "127.0.0.1:9", "--timeout", "0"),
    )
    assert_refused(result, "node-0 is not revoked", "127.0.0.1:9")
    assert json.loads((folder / "issued.json").read_text())[0]["revoked"] is None
