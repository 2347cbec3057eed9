"""A node's certificate, which signs its keys for nodes that trust the same authority."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import (
    Criticality,
    ExtensionPolicy,
    Policy,
    PolicyBuilder,
    Store,
    VerificationError,
)

from links.errors import LinkError
from links.records import Introduction, Peered

_FORMAT = "flwr-distill/key/1"


@dataclass(frozen=True)
class Credentials:
    """Contents of PEM files: the authority's certificate, the node's, and its private key."""

    authority: bytes
    certificate: bytes
    key: bytes

    @classmethod
    def of(cls, node_config: Mapping[str, object]) -> Credentials | None:
        """Credentials of the node with this node config; None if it has none."""
        if "peer-certificate" not in node_config:
            return None
        names = ("peer-authority", "peer-certificate", "peer-key")
        try:
            return cls(*(Path(str(node_config[name])).read_bytes() for name in names))
        except (KeyError, OSError) as error:
            raise LinkError(f"the node's peer credentials cannot be read: {error}") from error

    def sign(self, public_key: bytes, run_id: int, node_id: int) -> bytes:
        """Sign this node's public key for a run."""
        try:
            key = serialization.load_pem_private_key(self.key, password=None)
        except (ValueError, TypeError) as error:
            raise LinkError(f"peer-key is not a private key in PEM: {error}") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise LinkError(
                "peer-key must be an elliptic-curve key (openssl ecparam -name prime256v1 -genkey)"
            )
        return key.sign(_statement(public_key, run_id, str(node_id)), ec.ECDSA(SHA256()))

    def check_peer(self, waybill: Peered, run_id: int, node_id: str) -> None:
        """Raise `LinkError` unless a certificate of the federation signed the peer's public key."""
        try:
            certificate = x509.load_pem_x509_certificate(waybill.peer_certificate)
            authorities = x509.load_pem_x509_certificates(self.authority)
            policy = PolicyBuilder().store(Store(authorities)).max_chain_depth(0)
            policy.extension_policies(
                ca_policy=ExtensionPolicy.permit_all().require_present(
                    x509.BasicConstraints, Criticality.AGNOSTIC, None
                ),
                ee_policy=ExtensionPolicy.permit_all().require_present(
                    x509.ExtendedKeyUsage, Criticality.AGNOSTIC, _require_client_use
                ),
            ).build_client_verifier().verify(certificate, [])
            key = certificate.public_key()
            if not isinstance(key, ec.EllipticCurvePublicKey):
                raise ValueError("its certificate's key is not on an elliptic curve")
            statement = _statement(waybill.peer_key, run_id, node_id)
            key.verify(waybill.peer_signature, statement, ec.ECDSA(SHA256()))
        except (ValueError, VerificationError, InvalidSignature) as error:
            reason = str(error) or "wrong signature"
            raise LinkError(
                f"node {node_id}'s key is not signed with a certificate of the federation "
                f"(start it with --peer-certificate and --peer-key): {reason}"
            ) from None


def key_of(introduction: Introduction, run_id: int, node_id: int) -> str:
    """SHA-256 of the certificate's key that signed an introduction; '' if none did.

    It is the node's own key, whichever authority the certificate is from.
    """
    try:
        key = x509.load_pem_x509_certificate(introduction.certificate).public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey):
            return ""
        statement = _statement(introduction.public_key, run_id, str(node_id))
        key.verify(introduction.signature, statement, ec.ECDSA(SHA256()))
    except (ValueError, InvalidSignature):
        return ""
    encoded = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(encoded).hexdigest()


def _statement(public_key: bytes, run_id: int, node_id: str) -> bytes:
    return json.dumps([_FORMAT, str(run_id), node_id, public_key.hex()]).encode()


def _require_client_use(
    policy: Policy, certificate: x509.Certificate, usage: x509.ExtendedKeyUsage
) -> None:
    # The SuperLink's certificate is from the same authority, but for servers only.
    if ExtendedKeyUsageOID.CLIENT_AUTH not in usage:
        raise ValueError("its certificate is not for client authentication")
