"""`flwr-distill register`: register nodes with a SuperLink."""

from __future__ import annotations

import json

import typer

from flwr_distill.base.files import replacing
from flwr_distill.cli.connection import UserCertificate, UserKey, user_of
from flwr_distill.cli.errors import exit_on
from flwr_distill.cli.options import (
    DEFAULT_CERTIFICATES_DIR,
    CertificatesDir,
    ControlAddress,
    Timeout,
)
from flwr_distill.fleet.authority import CertificateError
from flwr_distill.fleet.certificates import CertificateFolder


def register(
    folder: CertificatesDir = DEFAULT_CERTIFICATES_DIR,
    superlink: ControlAddress = "127.0.0.1:9093",
    user_certificate: UserCertificate = None,
    user_key: UserKey = None,
    timeout: Timeout = 60.0,
) -> None:
    """Register the keys of all nodes of a certificates folder with a SuperLink.

    Waits for the SuperLink to answer. Registered nodes stay as they are, revoked ones are left out.
    Writes their keys to nodes.json, by which a ServerApp can check who has sent a reply.
    """
    from flwr_distill.flower.line_1_32.fleet.registration import SecureControl  # imports Flower
    from flwr_distill.flower.line_1_32.fleet.superlink import SuperLinkError

    authority = CertificateFolder(folder)
    user = user_of(user_certificate, user_key, "register")
    with exit_on(CertificateError, SuperLinkError, OSError, command="register"):
        nodes = [each for each in authority.issued() if each.is_node and not each.revoked]
        typer.echo(f"waiting for the SuperLink at {superlink} ...")
        with SecureControl(superlink, authority.certificate, user) as control:
            control.wait(timeout)
            keys: dict[int, str] = {}
            for node in nodes:
                node_id, is_new = control.register(node.registered_key)
                state = "registered" if is_new else "known already"
                typer.echo(f"{node.name}: {state}, Flower's node id is {node_id}")
                keys[node_id] = node.registered_key
        with replacing(folder / "nodes.json") as partial:
            partial.write_text(json.dumps(keys, indent=2) + "\n", encoding="utf-8")
