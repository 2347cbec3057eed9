"""A federation's own certificate authority, as a folder of PEM files.

::

    ca.crt  ca.key         the authority; its key stays here
    issued.json            everything it ever issued, with revocations
    server/                ca.crt, server.crt, server.key: for the SuperLink's machine
    NODE/                  ca.crt, node.crt, node.key, node.pub: for that node's machine

A node logs in at the SuperLink and talks to other nodes over mutual TLS with the same key. The
first needs it in OpenSSH's format, the second in PKCS#8; ``node.key`` holds both.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from task.durable import replacing

SERVER = "server"
"""Name of the SuperLink's certificate and folder."""

_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"(?=.{{1,253}}$)({_LABEL}\.)*(?![0-9]+$){_LABEL}")
_CLOCK_SKEW = datetime.timedelta(hours=1)
_PRIVATE, _PUBLIC = 0o600, 0o644
_PKCS8, _OPEN_SSH = serialization.PrivateFormat.PKCS8, serialization.PrivateFormat.OpenSSH


class CertificateError(Exception):
    """A certificate cannot be issued or revoked."""


@dataclass(frozen=True)
class Issued:
    """An issued certificate: serial number in hexadecimal, dates in UTC, key as for OpenSSH."""

    name: str
    hosts: list[str]
    serial: str
    expires: str
    public_key: str
    revoked: str | None = None

    @property
    def is_node(self) -> bool:
        """Whether it is a node's."""
        return self.name != SERVER


class CertificateFolder:
    """The authority and the certificates it issued; :meth:`create` makes the folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._register = path / "issued.json"

    @property
    def certificate(self) -> Path:
        """The authority's certificate."""
        return self._path / "ca.crt"

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

    def issue_server(self, hosts: Sequence[str], days: int) -> Issued:
        """Issue the SuperLink's certificate for every DNS name and address that reaches it."""
        return self._issue(SERVER, hosts, days, [ExtendedKeyUsageOID.SERVER_AUTH])

    def issue_node(self, name: str, hosts: Sequence[str], days: int) -> Issued:
        """Issue a node's key and certificate; other nodes reach it at `hosts`, else at `name`."""
        if name == SERVER or not _NAME.fullmatch(name):
            raise CertificateError(
                f"name={name}: give lower-case letters, digits, hyphens and dots, as in node-0 "
                f"({SERVER} is the SuperLink's)"
            )
        usage = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        return self._issue(name, hosts or [name], days, usage)

    def issued(self) -> list[Issued]:
        """Return all certificates that were issued, in order."""
        try:
            return [Issued(**fields) for fields in json.loads(self._register.read_text())]
        except FileNotFoundError:
            raise CertificateError(
                f"there is no authority in {self._path}: make one with `flwr-distill certs init`"
            ) from None

    def valid(self, name: str) -> Issued | None:
        """Return the certificate with this name that is not revoked, if there is one."""
        return next((c for c in self.issued() if c.name == name and c.revoked is None), None)

    def mark_revoked(self, revoked: Issued) -> None:
        """Record the revocation of a certificate."""
        today = _now().date().isoformat()
        self._save([replace(c, revoked=today) if c == revoked else c for c in self.issued()])

    def _issue(
        self, name: str, hosts: Sequence[str], days: int, usage: list[x509.ObjectIdentifier]
    ) -> Issued:
        issued = self.issued()
        if self.valid(name):
            raise CertificateError(
                f"{name} is issued already, in {self._path / name}: revoke it first with "
                f"`flwr-distill certs revoke {name}`"
            )
        ca_key, ca = self._load_authority()
        if _now() + datetime.timedelta(days=days) > ca.not_valid_after_utc:
            raise CertificateError(
                f"days={days}: the authority ends on {ca.not_valid_after_utc.date()}, before that"
            )
        key = ec.generate_private_key(ec.SECP384R1())
        certificate = (
            _builder(_name(name), key.public_key(), days)
            .issuer_name(ca.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
            .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), False
            )
            .sign(ca_key, hashes.SHA256())
        )
        public_key = key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        folder = self._path / name
        if name == SERVER:
            files = {folder / "server.key": _pem(key, _PKCS8)}
        else:
            files = {
                folder / "node.key": _pem(key, _PKCS8) + _pem(key, _OPEN_SSH),
                folder / "node.pub": public_key + f" {name}\n".encode(),
            }
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        files[folder / ("server.crt" if name == SERVER else "node.crt")] = pem
        files[folder / "ca.crt"] = ca.public_bytes(serialization.Encoding.PEM)
        _write_new(files)
        entry = Issued(
            name=name,
            hosts=list(hosts),
            serial=f"{certificate.serial_number:x}",
            expires=certificate.not_valid_after_utc.date().isoformat(),
            public_key=public_key.decode(),
        )
        self._save([*issued, entry])
        return entry

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


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


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
