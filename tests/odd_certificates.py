"""Certificates that are read only when one asks for a part of them, and then raise any error."""

import base64
import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

_CHANGES = {
    "curve": (bytes.fromhex("06082a8648ce3d030107"), bytes.fromhex("06082a8648ce3d03017f")),
    "name as bits": (b"\x0c\x01a", b"\x03\x01\x00"),
    "name as number": (b"\x0c\x01a", b"\x02\x01a"),
}
ODD = list(_CHANGES)


def odd_certificate(kind: str) -> bytes:
    """A certificate (PEM) with a curve that nobody knows, or a name of another type."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 5, now, now)
    content = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)
    body = base64.encodebytes(content.replace(*_CHANGES[kind]))
    return b"-----BEGIN CERTIFICATE-----\n" + body + b"-----END CERTIFICATE-----\n"
