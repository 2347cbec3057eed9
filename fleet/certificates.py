"""A federation's own certificate authority, as a folder of PEM files.

::

    ca.crt  ca.key         the authority; its key stays here
    ca.crl                 what is revoked, for nodes
    issued.json            everything it ever issued, with revocations
    server/                ca.crt, server.crt, server.key: for the SuperLink's machine
    NODE/                  ca.crt, node.crt, login.pub: for that node's machine
    USER/                  ca.crt, user.crt, user.key: for who submits runs

A node makes its keys on its own machine, and asks with :func:`request_node` for a certificate.
Where the authority makes keys as well, as for a federation on one machine, they are in the folder.

A node has two keys: ``login.key`` for the SuperLink, and ``node.key`` for other nodes. Apps sign
with the second, so a sandbox can read it; nothing in a sandbox may log in as the node.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import ipaddress
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from task.durable import replacing

SERVER = "server"
"""Name of the SuperLink's certificate and folder."""

Role = Literal["viewer", "submitter", "operator"]
"""What a user may do, by docker/gate/nginx.conf."""

_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"(?=.{{1,253}}$)({_LABEL}\.)*(?![0-9]+$){_LABEL}")
_CLOCK_SKEW = datetime.timedelta(hours=1)
_PRIVATE, _PUBLIC = 0o600, 0o644
_PKCS8, _OPEN_SSH_PRIVATE = serialization.PrivateFormat.PKCS8, serialization.PrivateFormat.OpenSSH
_LOGIN_KEY = x509.ObjectIdentifier("2.25.201453226710587265432418604275219804312")
"""Extension of a request: the public key for the login, in OpenSSH's format."""
_CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)


class CertificateError(Exception):
    """A certificate cannot be issued or revoked."""


@dataclass(frozen=True)
class Issued:
    """An issued certificate: serial number in hexadecimal, dates in UTC, keys as for OpenSSH.

    Users have a role; nodes and the SuperLink have none. Nodes have a key for their login; those of
    earlier versions log in with the certificate's.
    """

    name: str
    hosts: list[str]
    serial: str
    expires: str
    public_key: str
    revoked: str | None = None
    role: str = ""
    login_key: str = ""

    @property
    def registered_key(self) -> str:
        """The key with which a node logs in."""
        return self.login_key or self.public_key

    @property
    def is_node(self) -> bool:
        """Whether it is a node's."""
        return self.name != SERVER and not self.role

    @property
    def file(self) -> str:
        """Name of its file."""
        return "server.crt" if self.name == SERVER else "user.crt" if self.role else "node.crt"

    @property
    def days_left(self) -> int:
        """Days until it expires, of which the last is not a whole one."""
        return (datetime.date.fromisoformat(self.expires) - _now().date()).days

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the key, as OpenSSH writes it."""
        return _fingerprint(self.public_key)


class CertificateFolder:
    """The authority and the certificates it issued; :meth:`create` makes the folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._register = path / "issued.json"

    @property
    def certificate(self) -> Path:
        """The authority's certificate."""
        return self._path / "ca.crt"

    @property
    def revocations(self) -> Path:
        """The authority's revocation list, for nodes."""
        return self._path / "ca.crl"

    def create(self, days: int) -> None:
        """Make an authority that is valid for `days`."""
        key = ec.generate_private_key(ec.SECP384R1())
        certificate = (
            _builder(_name("flwr-distill authority"), key.public_key(), days)
            .issuer_name(_name("flwr-distill authority"))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        _write_new(
            {
                self._path / "ca.key": _pem(key, _PKCS8),
                self.certificate: certificate.public_bytes(serialization.Encoding.PEM),
                self._register: b"[]\n",
            }
        )
        self.write_revocations()

    def issue_server(self, hosts: Sequence[str], days: int) -> Issued:
        """Issue the SuperLink's certificate for every DNS name and address that reaches it."""
        key = new_key()
        return self._issue(SERVER, hosts, days, key.public_key(), {"server.key": _pem(key, _PKCS8)})

    def issue_node(self, name: str, hosts: Sequence[str], days: int) -> Issued:
        """Issue a node's keys and certificate; other nodes reach it at `hosts`, else at `name`."""
        _check_name(name)
        key, login = new_key(), new_key()
        files = {"node.key": _pem(key, _PKCS8), "login.key": _pem(login, _OPEN_SSH_PRIVATE)}
        public = _open_ssh(login.public_key())
        return self._issue(name, hosts or [name], days, key.public_key(), files, login_key=public)

    def issue_user(self, name: str, role: Role, days: int) -> Issued:
        """Issue a user's key and certificate, which bears the role; it is good for no node."""
        _check_name(name)
        key = new_key()
        files = {"user.key": _pem(key, _PKCS8)}
        return self._issue(name, [], days, key.public_key(), files, role)

    def sign(self, request: bytes, days: int, fingerprint: str | None = None) -> Issued:
        """Issue a certificate for a node's request (PEM), of :func:`request_node`.

        Name, hosts and keys are the request's; of all else that it may ask for nothing is granted.
        If there is a `fingerprint`, it must be the key's.
        """
        try:
            asked = x509.load_pem_x509_csr(request)
            (name,) = asked.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
            hosts = asked.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            login = _login_key(asked)
            key = asked.public_key()
            signed = asked.is_signature_valid
        except (
            *(ValueError, x509.InvalidVersion, x509.ExtensionNotFound, UnsupportedAlgorithm),
        ) as error:
            raise CertificateError(
                f"this is no request of `flwr-distill certs request` (of this version): {error}"
            ) from None
        if not signed:
            raise CertificateError("the request is not signed with its key: it was changed")
        for each in (key, login):
            if not isinstance(each, ec.EllipticCurvePublicKey) or not isinstance(
                each.curve, _CURVES
            ):
                raise CertificateError(
                    "the request's keys must be on the curve P-256, P-384 or P-521"
                )
        assert isinstance(key, ec.EllipticCurvePublicKey)
        assert isinstance(login, ec.EllipticCurvePublicKey)
        if key == login:
            raise CertificateError("the request's two keys must differ: apps can read one of them")
        if fingerprint is not None and fingerprint != _fingerprint(_open_ssh(key)):
            raise CertificateError(
                f"fingerprint={fingerprint}: the request's key has {_fingerprint(_open_ssh(key))}"
            )
        _check_name(str(name.value))
        names = [str(host.value) for host in hosts]
        return self._issue(str(name.value), names, days, key, {}, login_key=_open_ssh(login))

    def renew(self, name: str, days: int) -> Issued:
        """Issue a new certificate for the same key and hosts, in place of the last one."""
        last = self.valid(name)
        if last is None:
            raise CertificateError(f"{self._path} has issued no {name}, or it is revoked")
        key = serialization.load_ssh_public_key(last.public_key.encode())
        assert isinstance(key, ec.EllipticCurvePublicKey)
        entry, certificate = self._signed(
            name, last.hosts, days, key, last.role, login_key=last.login_key
        )
        with replacing(self._path / name / entry.file) as partial:
            partial.write_bytes(certificate)
        self._save([*self.issued(), entry])
        return entry

    def issued(self) -> list[Issued]:
        """Return all certificates that were issued, in order."""
        try:
            return [Issued(**fields) for fields in json.loads(self._register.read_text())]
        except FileNotFoundError:
            raise CertificateError(
                f"there is no authority in {self._path}: make one with `flwr-distill certs init`"
            ) from None

    def valid(self, name: str) -> Issued | None:
        """Return the last certificate with this name that is not revoked, if there is one."""
        mine = [each for each in self.issued() if each.name == name and each.revoked is None]
        return mine[-1] if mine else None

    def mark_revoked(self, name: str) -> None:
        """Record that all certificates with this name are revoked, and write the list anew."""
        today = _now().date().isoformat()
        issued = [
            replace(each, revoked=today) if each.name == name and each.revoked is None else each
            for each in self.issued()
        ]
        self._save(issued)
        self.write_revocations()

    def write_revocations(self) -> None:
        """Write the revocation list anew."""
        key, authority = self._load_authority()
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(authority.subject)
            .last_update(_now() - _CLOCK_SKEW)
            .next_update(authority.not_valid_after_utc)
        )
        for each in self.issued():
            if each.revoked is not None:
                date = datetime.datetime.fromisoformat(each.revoked)
                builder = builder.add_revoked_certificate(
                    x509.RevokedCertificateBuilder()
                    .serial_number(int(each.serial, 16))
                    .revocation_date(date)
                    .build()
                )
        revocations = builder.sign(key, hashes.SHA256())
        with replacing(self.revocations) as partial:
            partial.write_bytes(revocations.public_bytes(serialization.Encoding.PEM))

    def _issue(
        self,
        name: str,
        hosts: Sequence[str],
        days: int,
        key: ec.EllipticCurvePublicKey,
        files: dict[str, bytes],
        role: str = "",
        login_key: str = "",
    ) -> Issued:
        issued = self.issued()
        if self.valid(name):
            raise CertificateError(
                f"{name} is issued already, in {self._path / name}: `flwr-distill certs renew "
                f"{name}` renews it; for another key, `flwr-distill certs revoke {name}` first"
            )
        entry, certificate = self._signed(name, hosts, days, key, role, login_key)
        files = {
            **files,
            entry.file: certificate,
            "ca.crt": self.certificate.read_bytes(),
        }
        if entry.is_node:
            files["login.pub"] = f"{entry.login_key} {name}\n".encode()
        _write_new({self._path / name / file: content for file, content in files.items()})
        self._save([*issued, entry])
        return entry

    def _signed(
        self,
        name: str,
        hosts: Sequence[str],
        days: int,
        key: ec.EllipticCurvePublicKey,
        role: str,
        login_key: str,
    ) -> tuple[Issued, bytes]:
        """Return the entry of a new certificate, and the certificate in PEM."""
        ca_key, ca = self._load_authority()
        if _now() + datetime.timedelta(days=days) > ca.not_valid_after_utc:
            raise CertificateError(
                f"days={days}: the authority ends on {ca.not_valid_after_utc.date()}, before that"
            )
        usage = []
        if name != SERVER:
            usage.append(ExtendedKeyUsageOID.CLIENT_AUTH)
        if not role:
            usage.append(ExtendedKeyUsageOID.SERVER_AUTH)
        builder = _builder(_name(name, role), key, days)
        if hosts:
            builder = builder.add_extension(_hosts(hosts), critical=False)
        certificate = (
            builder.issuer_name(ca.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), False
            )
            .sign(ca_key, hashes.SHA256())
        )
        entry = Issued(
            name=name,
            hosts=list(hosts),
            serial=f"{certificate.serial_number:x}",
            expires=certificate.not_valid_after_utc.date().isoformat(),
            public_key=_open_ssh(key),
            role=role,
            login_key=login_key,
        )
        return entry, certificate.public_bytes(serialization.Encoding.PEM)

    def _load_authority(self) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
        try:
            key = serialization.load_pem_private_key(
                (self._path / "ca.key").read_bytes(), password=None
            )
            certificate = x509.load_pem_x509_certificate(self.certificate.read_bytes())
        except (OSError, ValueError, TypeError) as error:
            raise CertificateError(f"the authority cannot be read: {error}") from error
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return key, certificate

    def _save(self, issued: Sequence[Issued]) -> None:
        with replacing(self._register) as partial:
            partial.write_text(json.dumps([asdict(entry) for entry in issued], indent=2) + "\n")


def request_node(folder: Path, name: str, hosts: Sequence[str]) -> str:
    """Make a node's keys, and a request for its certificate, on the node's own machine.

    Parameters
    ----------
    folder : Path
        Where ``node.key``, ``login.key``, ``login.pub`` and ``node.csr`` are written; none may be
        there.
    name : str
        Name of the node, in the certificate.
    hosts : Sequence[str]
        DNS names and addresses at which other nodes reach it; empty for its name.

    Returns
    -------
    str
        The fingerprint of the certificate's key, which signs the request, as OpenSSH writes it.

    Raises
    ------
    CertificateError
        If name or host is malformed, or a file cannot be written.
    """
    _check_name(name)
    key, login = new_key(), new_key()
    login_key = _open_ssh(login.public_key())
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(_name(name))
        .add_extension(_hosts(hosts or [name]), critical=False)
        .add_extension(x509.UnrecognizedExtension(_LOGIN_KEY, login_key.encode()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write_new(
        {
            folder / "node.key": _pem(key, _PKCS8),
            folder / "login.key": _pem(login, _OPEN_SSH_PRIVATE),
            folder / "login.pub": f"{login_key} {name}\n".encode(),
            folder / "node.csr": request.public_bytes(serialization.Encoding.PEM),
        }
    )
    return _fingerprint(_open_ssh(key.public_key()))


def new_key() -> ec.EllipticCurvePrivateKey:
    """Make a key for a node, a user or the SuperLink.

    On P-256, since a SuperLink checks a node's signature at every call, and on P-384 that takes six
    times as long.
    """
    return ec.generate_private_key(ec.SECP256R1())


def _check_name(name: str) -> None:
    if name == SERVER or not _NAME.fullmatch(name):
        raise CertificateError(
            f"name={name}: give lower-case letters, digits, hyphens and dots, as in node-0 "
            f"({SERVER} is the SuperLink's)"
        )


def _fingerprint(public_key: str) -> str:
    digest = hashlib.sha256(base64.b64decode(public_key.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def _open_ssh(key: ec.EllipticCurvePublicKey) -> str:
    return key.public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    ).decode()


def _login_key(request: x509.CertificateSigningRequest) -> object:
    """The key with which the node that makes a request logs in."""
    value = request.extensions.get_extension_for_oid(_LOGIN_KEY).value
    assert isinstance(value, x509.UnrecognizedExtension)
    return serialization.load_ssh_public_key(value.value)


def _hosts(hosts: Sequence[str]) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName([_host(host) for host in hosts])


def _builder(
    subject: x509.Name, public_key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - _CLOCK_SKEW)
        .not_valid_after(_now() + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _name(common_name: str, role: str = "") -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    if role:
        attributes.append(x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role))
    return x509.Name(attributes)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not _HOST.fullmatch(host):
            raise CertificateError(
                f"host={host} is neither a DNS name nor an address: give it without a port"
            ) from None
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _write_new(files: dict[Path, bytes]) -> None:
    """Write files, none of which may exist; only their owner can read .key files."""
    for file in files:
        if file.exists():
            raise CertificateError(f"{file} exists: move it away first, it is never overwritten")
    try:
        for file, content in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            mode = _PRIVATE if file.suffix == ".key" else _PUBLIC
            with replacing(file) as partial:
                partial.touch(mode=mode)
                partial.write_bytes(content)
    except OSError as error:
        raise CertificateError(f"the certificate cannot be written: {error}") from error


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
