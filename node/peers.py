"""Checks before a node starts that its certificate is one that its peers will take."""

from __future__ import annotations

from pathlib import Path

from cryptography import x509

from flwr_distill.links.credentials import is_signed
from flwr_distill.node.settings import NodeError, NodeSettings


def check_peers(settings: NodeSettings) -> str:
    """Return what to log about who could take the SuperLink's place; '' if no node can.

    Raises
    ------
    NodeError
        If the node's certificate is not signed by the authority that it knows nodes by.
    """
    if settings.peer_certificate is None or settings.root_certificates is None:
        return ""
    (certificate, *_) = _load("peer-certificate", settings.peer_certificate)
    if settings.peer_authority is not None:
        if not is_signed(certificate, _load("peer-authority", settings.peer_authority)):
            raise NodeError(
                f"peer-authority={settings.peer_authority} has not signed "
                f"peer-certificate={settings.peer_certificate}: give the nodes-ca.crt and node.crt "
                "that `flwr-distill certs` wrote together"
            )
    elif not is_signed(certificate, _load("root-certificates", settings.root_certificates)):
        raise NodeError(
            f"root-certificates={settings.root_certificates} has not signed "
            f"peer-certificate={settings.peer_certificate}: give the authority of nodes as "
            "peer-authority (nodes-ca.crt of `flwr-distill certs`)"
        )
    if is_signed(certificate, _load("root-certificates", settings.root_certificates)):
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
        raise NodeError(f"{name}={file} is not a PEM file of certificates: {error}") from error
