"""One certificate authority: a certificate, a key and a revocation list in PEM."""

from __future__ import annotations

import base64
import datetime
import hashlib
import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from flwr_distill.base.files import replacing
from flwr_distill.task.errors import ReportedError

SERVER_USES = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
NODE_USES = x509.ExtendedKeyUsage(
    [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
)
"""A node is both client and server of other nodes."""
USER_USES = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])

_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"(?=.{{1,253}}$)({_LABEL}\.)*(?![0-9]+$){_LABEL}")
_CLOCK_SKEW = datetime.timedelta(hours=1)


class CertificateError(ReportedError):
    """A certificate cannot be issued or revoked."""


class Authority:
    """The authority whose files are `stem` with the endings .crt, .key and .crl."""

    def __init__(self, stem: Path) -> None:
        self.name = stem.name
        self.certificate = stem.with_name(f"{stem.name}.crt")
        self.key = stem.with_name(f"{stem.name}.key")
        self.revocations = stem.with_name(f"{stem.name}.crl")

    def make(self, common_name: str, days: int) -> dict[Path, bytes]:
        """Return the files of a new authority, for :func:`write_new`."""
        key = ec.generate_private_key(ec.SECP384R1())
        subject = subject_of(common_name)
        certificate = (
            _builder(subject, key.public_key(), days)
            .issuer_name(subject)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        return {
            self.key: private_pem(key, serialization.PrivateFormat.PKCS8),
            self.certificate: certificate.public_bytes(Encoding.PEM),
        }

    def sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        hosts: Sequence[str],
        uses: x509.ExtendedKeyUsage,
        days: int,
    ) -> x509.Certificate:
        """Sign a certificate for a key."""
        ca_key, ca = self._load()
        if now() + datetime.timedelta(days=days) > ca.not_valid_after_utc:
            end = ca.not_valid_after_utc.date()
            raise CertificateError(f"the authority ends on {end}", where="days", value=days)
        builder = _builder(subject, key, days)
        if hosts:
            builder = builder.add_extension(names_of(hosts), critical=False)
        return (
            builder.issuer_name(ca.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(uses, critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), False
            )
            .sign(ca_key, hashes.SHA256())
        )

    def write_revocations(self, revoked: Mapping[int, datetime.datetime]) -> None:
        """Write the revocation list: serial numbers, and since when."""
        key, authority = self._load()
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(authority.subject)
            .last_update(now() - _CLOCK_SKEW)
            .next_update(authority.not_valid_after_utc)
        )
        for serial, date in revoked.items():
            builder = builder.add_revoked_certificate(
                x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(date).build()
            )
        with replacing(self.revocations) as partial:
            partial.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))

    def _load(self) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
        try:
            key = serialization.load_pem_private_key(self.key.read_bytes(), password=None)
            certificate = x509.load_pem_x509_certificate(self.certificate.read_bytes())
        except (OSError, ValueError, TypeError) as error:
            raise CertificateError(
                f"it or {self.certificate.name} cannot be read: {error}",
                where=self.key,
                remedy="restore them from a copy",
            ) from error
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return key, certificate


def new_key() -> ec.EllipticCurvePrivateKey:
    """Make a key for a node, a user or the SuperLink.

    A SuperLink checks a node's signature at every call: P-384 would take six times as long.
    """
    return ec.generate_private_key(ec.SECP256R1())


def subject_of(common_name: str, role: str = "") -> x509.Name:
    """Subject of a certificate; users have a role."""
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    if role:
        attributes.append(x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role))
    return x509.Name(attributes)


def names_of(hosts: Sequence[str]) -> x509.SubjectAlternativeName:
    """Extension with DNS names and addresses."""
    return x509.SubjectAlternativeName([_host(host) for host in hosts])


def shared_hosts(hosts: Sequence[str], others: Sequence[str]) -> list[str]:
    """Hosts that are among `others` in any spelling, except loopback, which all machines have."""
    known = {_host(host.lower()) for host in others}
    names = {host: _host(host.lower()) for host in hosts}
    return [host for host, name in names.items() if name in known and not _is_loopback(name)]


def fingerprint(public_key: str) -> str:
    """SHA-256 of a key, as OpenSSH writes it."""
    digest = hashlib.sha256(base64.b64decode(public_key.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def open_ssh(key: ec.EllipticCurvePublicKey) -> str:
    """A public key in OpenSSH's format."""
    return key.public_bytes(Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def private_pem(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    """A private key in PEM, without a password."""
    return key.private_bytes(Encoding.PEM, form, serialization.NoEncryption())


def check_new(files: Iterable[Path]) -> None:
    """Raise CertificateError if one of the files exists."""
    for file in files:
        if file.exists():
            raise CertificateError("exists", where=file, remedy="it is never overwritten: move it")


def write_new(files: Mapping[Path, bytes]) -> None:
    """Write files, none of which may exist; only their owner can read .key files."""
    check_new(files)
    try:
        for file, content in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file) as partial:
                partial.touch(mode=0o600 if file.suffix == ".key" else 0o644)
                partial.write_bytes(content)
    except OSError as error:
        raise CertificateError(
            f"the certificate cannot be written: {error}",
            remedy="give a folder in which this user may write",
        ) from error


def now() -> datetime.datetime:
    """Time in UTC."""
    return datetime.datetime.now(datetime.UTC)


def _builder(
    subject: x509.Name, public_key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now() - _CLOCK_SKEW)
        .not_valid_after(now() + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        **dict.fromkeys((*others, "encipher_only", "decipher_only"), False),
    )


def _host(host: str) -> x509.DNSName | x509.IPAddress:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not _HOST.fullmatch(host):
            raise CertificateError(
                "is neither a DNS name nor an address",
                where="host",
                value=host,
                remedy="give it without a port",
            ) from None
        return x509.DNSName(host)


def _is_loopback(name: x509.DNSName | x509.IPAddress) -> bool:
    value = name.value
    return value == "localhost" if isinstance(value, str) else getattr(value, "is_loopback", False)
