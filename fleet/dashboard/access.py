"""Who may see and do what: on loopback everyone there, elsewhere by the role in a certificate."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from cryptography import x509

from flwr_distill.fleet import authority
from flwr_distill.task.errors import ReportedError

LOOPBACK = ("127.0.0.1", "localhost")


class AccessError(ReportedError):
    """A dashboard cannot be served like that."""


class Role(IntEnum):
    """Roles of users, as `flwr-distill certs user` writes them; each may do what lower ones may."""

    NOBODY = 0
    VIEWER = 1
    """Sees nodes, queue, runs and reports."""
    SUBMITTER = 2
    """Also starts, stops, resumes and exports runs, where that is allowed at all."""
    OPERATOR = 3
    """Also sees what left the nodes of the dashboard's machine."""


@dataclass(frozen=True)
class Tls:
    """Files (PEM) of the server's certificate, of the users' authority, and of its revocations."""

    certificate: Path
    key: Path
    authority: Path
    revocations: Path

    def context(self) -> ssl.SSLContext:
        """Context that admits users with a certificate of the authority alone."""
        try:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.authority)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_cert_chain(self.certificate, self.key)
            _revocations(self)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise AccessError(
                f"cannot be used: {error}",
                where="TLS",
                value=str(self.certificate),
                remedy="give the files of `flwr-distill certs init` and `certs server`",
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
        return context


@dataclass
class Access:
    """Gives the role of a caller; without `tls` everyone who reaches the dashboard is an operator.

    Revocations are read again when their file changes. Once they have expired or cannot be read,
    nobody is admitted.
    """

    tls: Tls | None = None
    _revoked: frozenset[int] = frozenset()
    _read: tuple[int, int] = field(default=(0, 0))
    _until: float = 0.0

    def role(self, certificate: Mapping[str, Any] | None) -> Role:
        """Role in a certificate, as `ssl.SSLSocket.getpeercert` gives it, that TLS has verified."""
        if self.tls is None:
            return Role.OPERATOR
        if certificate is None or not self._is_valid(int(str(certificate["serialNumber"]), 16)):
            return Role.NOBODY
        if ssl.cert_time_to_seconds(str(certificate["notAfter"])) < authority.now().timestamp():
            return Role.NOBODY
        units = [
            value
            for pairs in certificate.get("subject", ())
            for key, value in pairs
            if key == "organizationalUnitName"
        ]
        known = {role.name.lower(): role for role in Role if role}
        return known.get(units[0], Role.NOBODY) if len(units) == 1 else Role.NOBODY

    def _is_valid(self, serial: int) -> bool:
        assert self.tls is not None
        try:
            status = self.tls.revocations.stat()
            if (stamp := (status.st_mtime_ns, status.st_size)) != self._read:
                self._revoked, self._until = _revocations(self.tls)
                self._read = stamp
        except (OSError, ValueError):
            self._read = (0, 0)
            return False
        return authority.now().timestamp() < self._until and serial not in self._revoked


def _revocations(tls: Tls) -> tuple[frozenset[int], float]:
    """Serial numbers that are revoked, and until when that is the latest list."""
    signer = x509.load_pem_x509_certificate(tls.authority.read_bytes())
    revocations = x509.load_pem_x509_crl(tls.revocations.read_bytes())
    if not revocations.is_signature_valid(signer.public_key()):  # type: ignore[arg-type]
        raise ValueError("another authority's list")
    until = revocations.next_update_utc
    serials = frozenset(each.serial_number for each in revocations)
    return serials, until.timestamp() if until else 0.0
