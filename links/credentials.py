"""A node's certificate, which signs its keys for nodes that trust the same authority."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from cryptography.x509.verification import (
    Criticality,
    ExtensionPolicy,
    Policy,
    PolicyBuilder,
    Store,
)

from flwr_distill.links.errors import LinkError
from flwr_distill.links.records import Introduction, Peered, Route

_FORMAT = "flwr-distill/key/2"


@dataclass(frozen=True)
class Credentials:
    """PEM files with which a node shows who it is, and judges others.

    `revocations` is empty for no list, `names` for all nodes of the authority.
    """

    authority: bytes
    certificate: bytes
    key: bytes
    revocations: bytes = b""
    names: frozenset[str] = frozenset()

    @classmethod
    def of(cls, node_config: Mapping[str, object]) -> Credentials | None:
        """Credentials of the node with this node config; None if it has none."""
        if "peer-certificate" not in node_config:
            return None
        names = str(node_config.get("peer-names", "")).split(",")

        def content(file: str) -> bytes:
            return Path(str(node_config[file])).read_bytes()

        try:
            return cls(
                content("peer-authority"),
                content("peer-certificate"),
                content("peer-key"),
                content("peer-revocations") if "peer-revocations" in node_config else b"",
                frozenset(filter(None, names)),
            )
        except (KeyError, OSError) as error:
            raise LinkError(f"unreadable: {error}", where="peer credentials") from error

    def sign(self, public_key: bytes, run_id: int, node_id: int) -> bytes:
        """Sign this node's public key for a run."""
        try:
            key = serialization.load_pem_private_key(self.key, password=None)
        except (ValueError, TypeError) as error:
            raise LinkError(f"not a private key in PEM: {error}", where="peer-key") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise LinkError(
                "must be an elliptic-curve key",
                where="peer-key",
                remedy="openssl ecparam -name prime256v1 -genkey",
            )
        statement = _statement(public_key, run_id, str(node_id), name_of(self.certificate))
        return key.sign(statement, ec.ECDSA(SHA256()))

    def sign_address(self, address: str, run_id: int, node_id: int) -> bytes:
        """Sign the address of this node's mailbox for a run."""
        return self.sign(_address_statement(address), run_id, node_id)

    def check_address(self, route: Route, run_id: int) -> None:
        """Raise `LinkError` unless the receiver, judged by `check_peer`, signed its address."""
        key = x509.load_pem_x509_certificate(route.peer_certificate).public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        about = _address_statement(route.address), run_id, route.receiver, route.peer_name
        try:
            key.verify(route.address_signature, _statement(*about), ec.ECDSA(SHA256()))
        except InvalidSignature:
            raise LinkError(
                f"node {route.receiver} has not signed the address; is it the server's?",
                where="address",
                value=route.address,
            ) from None

    def days_left(self) -> float:
        """Days until the node's certificate expires."""
        ends = x509.load_pem_x509_certificate(self.certificate).not_valid_after_utc
        return (ends - datetime.datetime.now(datetime.UTC)) / datetime.timedelta(days=1)

    def check_peer(self, waybill: Peered, run_id: int, node_id: str) -> None:
        """Raise `LinkError` unless the peer's public key is that of a node to talk to.

        It must be signed with a certificate of the federation that has the waybill's name, is not
        revoked, and is among `names`, if there are any.
        """
        try:
            certificate = x509.load_pem_x509_certificate(waybill.peer_certificate)
            authorities = x509.load_pem_x509_certificates(self.authority)
            policy = PolicyBuilder().store(Store(authorities)).max_chain_depth(0)
            policy.extension_policies(
                ca_policy=ExtensionPolicy.permit_all().require_present(
                    x509.BasicConstraints, Criticality.AGNOSTIC, None
                ),
                ee_policy=ExtensionPolicy.permit_all().require_present(
                    x509.ExtendedKeyUsage, Criticality.AGNOSTIC, _require_both_uses
                ),
            ).build_client_verifier().verify(certificate, [])
            key = certificate.public_key()
            if not isinstance(key, ec.EllipticCurvePublicKey):
                raise ValueError("its certificate's key is not on an elliptic curve")
            name = name_of(waybill.peer_certificate)
            statement = _statement(waybill.peer_key, run_id, node_id, name)
            key.verify(waybill.peer_signature, statement, ec.ECDSA(SHA256()))
        except Exception as error:  # whatever a hostile certificate makes the parser raise
            reason = str(error) or "wrong signature"
            raise LinkError(
                f"its key is not signed with a certificate of the federation: {reason}",
                where=f"node {node_id}",
                remedy="start it with --peer-certificate and --peer-key",
            ) from None
        problem = ""
        if name != waybill.peer_name:
            problem = f"is {name}, and the server says {waybill.peer_name!r}"
        elif self.names and name not in self.names:
            problem = f"is {name}, which is not among peer-names"
        elif certificate.serial_number in self._revoked(authorities):
            problem = f"is {name}, whose certificate is revoked"
        if problem:
            raise LinkError(problem, where=f"node {node_id}")

    def _revoked(self, authorities: list[x509.Certificate]) -> set[int]:
        if not self.revocations:
            return set()
        try:
            revoked = x509.load_pem_x509_crl(self.revocations)
        except ValueError as error:
            problem = f"not a revocation list in PEM: {error}"
            raise LinkError(problem, where="peer-revocations") from None
        keys = (authority.public_key() for authority in authorities)
        if not any(revoked.is_signature_valid(key) for key in keys):  # type: ignore[arg-type]
            raise LinkError("not signed by the nodes' authority", where="peer-revocations")
        return {each.serial_number for each in revoked}


def is_signed(certificate: x509.Certificate, authorities: Sequence[x509.Certificate]) -> bool:
    """Whether one of the authorities has signed a certificate."""
    for authority in authorities:
        try:
            certificate.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature):
            continue
        return True
    return False


def name_of(certificate: bytes) -> str:
    """Name of the node in its certificate (PEM); '' if it has no printable one."""
    try:
        subject = x509.load_pem_x509_certificate(certificate).subject
        names = [str(name.value) for name in subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    except Exception:  # whatever a hostile certificate makes the parser raise
        return ""
    return names[0] if len(names) == 1 and len(names[0]) <= 64 and names[0].isprintable() else ""


def key_of(introduction: Introduction, run_id: int, node_id: int) -> str:
    """SHA-256 of the certificate's key that signed an introduction; '' if none did."""
    try:
        key = x509.load_pem_x509_certificate(introduction.certificate).public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey):
            return ""
        name = name_of(introduction.certificate)
        statement = _statement(introduction.public_key, run_id, str(node_id), name)
        key.verify(introduction.signature, statement, ec.ECDSA(SHA256()))
    except Exception:  # whatever a hostile certificate makes the parser raise
        return ""
    encoded = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(encoded).hexdigest()


def _statement(public_key: bytes, run_id: int, node_id: str, name: str) -> bytes:
    return json.dumps([_FORMAT, str(run_id), node_id, name, public_key.hex()]).encode()


def _address_statement(address: str) -> bytes:
    # Longer than any key, so that a signature of one is none of the other.
    return b"flwr-distill/address/1 of a mailbox: " + address.encode()


def _require_both_uses(
    policy: Policy, certificate: x509.Certificate, usage: x509.ExtendedKeyUsage
) -> None:
    # The same authority has certified the SuperLink, for servers only, and users, for clients only.
    if not {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH} <= set(usage):
        raise ValueError("its certificate is not for client and server authentication")
