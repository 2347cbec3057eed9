"""A node's request for its certificate: its name, its two keys, its role, and requested hosts.

A node makes its keys on its own machine, so that the authority never has them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from flwr_distill.fleet.authority import (
    NODE_USES,
    CertificateError,
    fingerprint,
    names_of,
    new_key,
    open_ssh,
    private_pem,
    subject_of,
    write_new,
)

SERVER = "server"
"""Name of the SuperLink's certificate and folder."""

_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
_LOGIN_KEY = x509.ObjectIdentifier("2.25.201453226710587265432418604275219804312")
"""Extension of a request: the public key for the login, in OpenSSH's format."""
_MALFORMED = (ValueError, x509.InvalidVersion, x509.ExtensionNotFound, UnsupportedAlgorithm)
_CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)


@dataclass(frozen=True)
class NodeRequest:
    """Content of a request; only the signer decides on the `hosts`."""

    name: str
    hosts: list[str]
    key: ec.EllipticCurvePublicKey
    login_key: str


def request_node(folder: Path, name: str, hosts: Sequence[str]) -> str:
    """Make a node's keys, and a request for its certificate, on the node's own machine.

    Parameters
    ----------
    folder : Path
        Where ``node.key``, ``login.key``, ``login.pub`` and ``node.csr`` are written; none may
        exist.
    name : str
        Name of the node, in the certificate.
    hosts : Sequence[str]
        DNS names and addresses at which other nodes reach it, for the signer to confirm; empty for
        its name.

    Returns
    -------
    str
        The fingerprint of the certificate's key, which signs the request, as OpenSSH writes it.

    Raises
    ------
    CertificateError
        If name or host is malformed, or a file cannot be written.
    """
    check_name(name)
    key, login = new_key(), new_key()
    login_key = open_ssh(login.public_key())
    builder = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(subject_of(name))
        .add_extension(NODE_USES, critical=False)
        .add_extension(x509.UnrecognizedExtension(_LOGIN_KEY, login_key.encode()), critical=False)
    )
    if hosts:
        builder = builder.add_extension(names_of(hosts), critical=False)
    request = builder.sign(key, hashes.SHA256())
    write_new(
        {
            folder / "node.key": private_pem(key, serialization.PrivateFormat.PKCS8),
            folder / "login.key": private_pem(login, serialization.PrivateFormat.OpenSSH),
            folder / "login.pub": f"{login_key} {name}\n".encode(),
            folder / "node.csr": request.public_bytes(serialization.Encoding.PEM),
        }
    )
    return fingerprint(open_ssh(key.public_key()))


def read_request(content: bytes) -> NodeRequest:
    """Read an untrusted request (PEM) of :func:`request_node`.

    Raises `CertificateError` if it is malformed, not signed with its key, or for another role than
    a node's.
    """
    try:
        request = x509.load_pem_x509_csr(content)
        (name,) = request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        uses = request.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        hosts = _hosts(request)
        login = _login_key(request)
        key = request.public_key()
        signed = request.is_signature_valid
    except _MALFORMED as error:
        raise CertificateError(
            f"not a request of `flwr-distill certs request` (of this version): {error}"
        ) from None
    if not signed:
        raise CertificateError("the request is not signed with its key: it was changed")
    for each in (key, login):
        if not isinstance(each, ec.EllipticCurvePublicKey) or not isinstance(each.curve, _CURVES):
            raise CertificateError("the request's keys must be on the curve P-256, P-384 or P-521")
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert isinstance(login, ec.EllipticCurvePublicKey)
    if key == login:
        raise CertificateError("the request's two keys must differ: apps can read one of them")
    if set(uses) != set(NODE_USES):
        raise CertificateError(
            "the request is for another role than a node's: its extended key usage is not client "
            "and server authentication",
            remedy="make it with `flwr-distill certs request`",
        )
    check_name(str(name.value))
    return NodeRequest(str(name.value), hosts, key, open_ssh(login))


def check_name(name: str) -> None:
    """Raise `CertificateError` unless nodes and users may have this name."""
    if name == SERVER or not _NAME.fullmatch(name):
        raise CertificateError(
            f"must be of lower-case letters, digits, hyphens and dots, and not {SERVER}",
            where="name",
            value=name,
            remedy="as in node-0",
        )


def _hosts(request: x509.CertificateSigningRequest) -> list[str]:
    try:
        names = request.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    hosts = [str(name.value) for name in names]
    if not all(map(str.isprintable, hosts)):
        raise ValueError("a host is not printable")
    names_of(hosts)
    return hosts


def _login_key(request: x509.CertificateSigningRequest) -> object:
    value = request.extensions.get_extension_for_oid(_LOGIN_KEY).value
    assert isinstance(value, x509.UnrecognizedExtension)
    return serialization.load_ssh_public_key(value.value)
