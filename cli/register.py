"""`flwr-distill register`: tell a SuperLink which nodes to admit."""

from __future__ import annotations

import typer

from cli.options import DEFAULT_CERTIFICATES_DIR, CertificatesDir, ControlAddress, Timeout
from fleet.certificates import CertificateError, CertificateFolder


def register(
    folder: CertificatesDir = DEFAULT_CERTIFICATES_DIR,
    superlink: ControlAddress = "127.0.0.1:9093",
    timeout: Timeout = 60.0,
) -> None:
    """Register the keys of all nodes of a certificates' folder with a SuperLink.

    Nodes that the SuperLink knows are left as they are, and revoked ones out. Waits for the
    SuperLink to answer.
    """
    from fleet.registration import RegistrationError, SecureControl  # imports Flower

    authority = CertificateFolder(folder)
    try:
        nodes = [each for each in authority.issued() if each.is_node and not each.revoked]
        typer.echo(f"waiting for the SuperLink at {superlink} ...")
        with SecureControl(superlink, authority.certificate) as control:
            control.wait(timeout)
            for node in nodes:
                node_id, new = control.register(node.public_key)
                known = "registered" if new else "known already"
                typer.echo(f"{node.name}: {known}, Flower's node id is {node_id}")
    except (CertificateError, RegistrationError) as error:
        typer.echo(f"flwr-distill register: {error}", err=True)
        raise typer.Exit(1) from error
