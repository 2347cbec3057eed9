"""A federation's own certificate authority, as a folder of PEM files.

::

    ca.crt  ca.key         the authority; its key stays here
    issued.json            everything it ever issued, and what was revoked
    server/                ca.crt, server.crt, server.key: for the machine with the SuperLink
    NODE/                  ca.crt, node.crt, node.key, node.pub: for the machine with that node

A node has one key for both of its purposes: to log in at the SuperLink, which reads it in OpenSSH's
format, and to meet other nodes over mutual TLS, which reads it in PKCS#8; ``node.key`` holds both.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

SERVER = "server"
"""Folder and name of what the SuperLink gets."""

_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"(?=.{{1,253}}$)({_LABEL}\.)*(?![0-9]+$){_LABEL}")
_CLOCK_SKEW = datetime.timedelta(hours=1)
_PRIVATE, _PUBLIC = 0o600, 0o644


class CertificateError(Exception):
    """It cannot be issued or revoked; the text says why, in one line."""


@dataclass(frozen=True)
class Issued:
    """One line of the authority's books.

    Attributes
    ----------
    name : str
        Of the node, or `SERVER`.
    hosts : list[str]
        DNS names and addresses that the certificate is for.
    serial : str
        The certificate's serial number, in hexadecimal.
    expires : str
        Day of its end, in UTC.
    public_key : str
        In OpenSSH's format.
    revoked : str or None
        Day of revocation.
    """

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
    """The authority and what it issued.

    Parameters
    ----------
    path : Path
        The folder; made by :meth:`create`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._books = path / "issued.json"

    @property
    def certificate(self) -> Path:
        """The authority's certificate."""
        return self._path / "ca.crt"

    def create(self, days: int) -> None:
        """Make the authority, good for so many days.

        Raises
        ------
        CertificateError
            If there is one.
        """
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
                self._path / "ca.key": _pkcs8(key),
                self.certificate: certificate.public_bytes(serialization.Encoding.PEM),
                self._books: b"[]\n",
            }
        )

    def issue_server(self, hosts: Sequence[str], days: int) -> Issued:
        """Issue the SuperLink's certificate.

        Parameters
        ----------
        hosts : Sequence[str]
            Every DNS name and address under which it is reached.
        days : int
            Until it expires.

        Raises
        ------
        CertificateError
            If a host is malformed, there is one already, or the authority ends before.
        """
        return self._issue(SERVER, hosts, days, [ExtendedKeyUsageOID.SERVER_AUTH])

    def issue_node(self, name: str, hosts: Sequence[str], days: int) -> Issued:
        """Issue a node's key and certificate.

        Parameters
        ----------
        name : str
            Name of the node, and of its folder.
        hosts : Sequence[str]
            DNS names and addresses where other nodes reach it; empty: its name.
        days : int
            Until the certificate expires.

        Raises
        ------
        CertificateError
            As :meth:`issue_server`, or if the name is malformed.
        """
        if name == SERVER or not _NAME.fullmatch(name):
            raise CertificateError(
                f"name={name}: give lower-case letters, digits, hyphens and dots, as in node-0 "
                f"({SERVER} is the SuperLink's)"
            )
        usage = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        return self._issue(name, hosts or [name], days, usage)

    def issued(self) -> list[Issued]:
        """Return everything that was issued, in order.

        Raises
        ------
        CertificateError
            If there is no authority.
        """
        try:
            return [Issued(**line) for line in json.loads(self._books.read_text())]
        except FileNotFoundError:
            raise CertificateError(
                f"there is no authority in {self._path}: make one with `flwr-distill certs init`"
            ) from None

    def valid(self, name: str) -> Issued | None:
        """Return what is issued by this name and not revoked, if anything is."""
        lines = (line for line in self.issued() if line.name == name and line.revoked is None)
        return next(lines, None)

    def mark_revoked(self, revoked: Issued) -> None:
        """Write into the books that something issued no longer counts."""
        today = _now().date().isoformat()
        self._write_books([replace(x, revoked=today) if x == revoked else x for x in self.issued()])

    def _issue(
        self, name: str, hosts: Sequence[str], days: int, usage: list[x509.ObjectIdentifier]
    ) -> Issued:
        books = self.issued()
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
            files = {folder / "server.key": _pkcs8(key)}
        else:
            files = {
                folder / "node.key": _pkcs8(key) + _open_ssh(key),
                folder / "node.pub": public_key + f" {name}\n".encode(),
            }
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        files[folder / ("server.crt" if name == SERVER else "node.crt")] = pem
        files[folder / "ca.crt"] = ca.public_bytes(serialization.Encoding.PEM)
        _write_new(files)
        line = Issued(
            name=name,
            hosts=list(hosts),
            serial=f"{certificate.serial_number:x}",
            expires=certificate.not_valid_after_utc.date().isoformat(),
            public_key=public_key.decode(),
        )
        self._write_books([*books, line])
        return line

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

    def _write_books(self, lines: Sequence[Issued]) -> None:
        fresh = self._books.with_suffix(".new")
        fresh.write_text(json.dumps([asdict(line) for line in lines], indent=2) + "\n")
        fresh.replace(self._books)


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


def _pkcs8(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _open_ssh(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )


def _write_new(files: dict[Path, bytes]) -> None:
    """Write files of which none may exist; keys, which end in .key, for their owner only."""
    for file in files:
        if file.exists():
            raise CertificateError(f"{file} exists: move it away first, it is never overwritten")
    try:
        for file, content in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            mode = _PRIVATE if file.suffix == ".key" else _PUBLIC
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as new:
                new.write(content)
    except OSError as error:
        raise CertificateError(f"it cannot be written: {error}") from error


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
