"""Checks before a node starts that its peers will accept its certificate."""

from __future__ import annotations

from pathlib import Path

from cryptography import x509

from flwr_distill.links.credentials import is_signed
from flwr_distill.node.settings import NodeError, NodeSettings


def check_peers(settings: NodeSettings) -> str:
    """Return what to log about who could take the SuperLink's place; '' if no node can.

    NodeError if the authority by which the node knows nodes has not signed its certificate.
    """
    if settings.peer_certificate is None or settings.root_certificates is None:
        return ""
    (certificate, *_) = _load("peer-certificate", settings.peer_certificate)
    roots = _load("root-certificates", settings.root_certificates)
    name, authority, signers = "root-certificates", settings.root_certificates, roots
    remedy = "give the authority of nodes as peer-authority (nodes-ca.crt of `flwr-distill certs`)"
    if settings.peer_authority is not None:
        name, authority = "peer-authority", settings.peer_authority
        signers = _load(name, authority)
        remedy = "give the nodes-ca.crt and node.crt that one `flwr-distill certs` wrote"
    if not is_signed(certificate, signers):
        problem = f"has not signed peer-certificate={settings.peer_certificate}"
        raise NodeError(problem, where=name, value=str(authority), remedy=remedy)
    if is_signed(certificate, roots):
        return (
            "root-certificates sign nodes as well as the SuperLink, so that a node whose "
            "certificate names the SuperLink's host could take its place: use two authorities "
            "(Keys in docs/deploy.md)"
        )
    return ""


def _load(name: str, file: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(file.read_bytes())
    except (OSError, ValueError) as error:
        problem = f"not a PEM file of certificates: {error}"
        raise NodeError(problem, where=name, value=str(file)) from error
