"""`flwr-distill certs`: a federation's own certificate authority."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from flwr_distill.cli.connection import UserCertificate, UserKey, user_of
from flwr_distill.cli.errors import exit_on
from flwr_distill.cli.options import (
    DEFAULT_CERTIFICATES_DIR,
    CertificatesDir,
    ControlAddress,
    Timeout,
)
from flwr_distill.fleet.authority import CertificateError
from flwr_distill.fleet.certificates import CertificateFolder, Issued, Role
from flwr_distill.fleet.node_request import SERVER, request_node

certs = typer.Typer(
    help="Issue keys and certificates for a federation, from its own authorities.",
    no_args_is_help=True,
)

Days = Annotated[int, typer.Option("--days", min=1, help="Days until it expires.")]
Hosts = Annotated[
    list[str] | None,
    typer.Option("--host", help="DNS name or address of the machine; can be repeated."),
]
Keep = Annotated[
    bool,
    typer.Option(
        "--keep", help="If it exists, leave it and succeed; renew it in its last ten days."
    ),
]
NodeName = Annotated[str, typer.Argument(help="Name of the node, as in node-0.")]

_LARGEST_REQUEST = 2**16
_RENEWED_WITHIN = 10


@certs.command()
def init(
    folder: CertificatesDir = DEFAULT_CERTIFICATES_DIR, days: Days = 3650, keep: Keep = False
) -> None:
    """Make the authorities: ca.crt for every machine, nodes-ca.crt for nodes; keys stay here.

    With --keep, a folder of an earlier version gets what it is missing.
    """
    authority = CertificateFolder(folder)
    with exit_on(CertificateError, command="certs"):
        if keep and authority.certificate.exists():
            exposed = authority.complete(days)
            typer.echo(f"{authority.certificate} is kept")
            for name in exposed:
                typer.echo(
                    f"{name}: its certificate, of an earlier version, names the SuperLink's host "
                    "and is good for its place: make new authorities in another folder",
                    err=True,
                )
            return
        authority.create(days)
    keys = f"{folder / 'ca.key'} and nodes-ca.key"
    typer.echo(f"{authority.certificate}: for {days} days; {keys} must stay here")


@certs.command()
def server(
    folder: CertificatesDir = DEFAULT_CERTIFICATES_DIR,
    host: Hosts = None,
    days: Days = 365,
    keep: Keep = False,
) -> None:
    """Issue the SuperLink's key and certificate, into the folder `server`.

    Give every name and address by which nodes and users reach the SuperLink as --host.
    """
    if not host:
        raise typer.BadParameter("give at least one", param_hint="--host")
    _issue(folder, SERVER, keep, days, lambda: CertificateFolder(folder).issue_server(host, days))


@certs.command()
def node(
    name: NodeName,
    folder: CertificatesDir = DEFAULT_CERTIFICATES_DIR,
    host: Hosts = None,
    days: Days = 30,
    keep: Keep = False,
) -> None:
    """Issue a node's keys and certificate, into a folder with the node's name.

    The node needs ca.crt (--root-certificates), login.key (--auth-key), nodes-ca.crt
    (--peer-authority), node.crt (--peer-certificate) and node.key (--peer-key). --host is where
    other nodes reach it, as in its --peer-address; the default is its name. Register it with the
    SuperLink by `flwr-distill register`.

    So the authority knows the node's keys. With `request` and `sign` it does not.
    """
    _issue(
        folder,
        name,
        keep,
        days,
        lambda: CertificateFolder(folder).issue_node(name, host or [], days),
    )


@certs.command()
def user(
    name: Annotated[str, typer.Argument(help="Name of a person or a service.")],
    role: Annotated[
        Role,
        typer.Option(
            help="viewer: runs, their logs, nodes; submitter: starts and stops runs as well; "
            "operator: everything, as to register nodes."
        ),
    ],
    folder: CertificatesDir = DEFAULT_CERTIFICATES_DIR,
    days: Days = 30,
    keep: Keep = False,
) -> None:
    """Issue a user's key and certificate, for the gate in front of the Control API.

    Commands take them as --user-certificate and --user-key. Who may do what is in
    docker/gate/nginx.conf; docs/deploy.md shows how to start it.
    """
    _issue(folder, name, keep, days, lambda: CertificateFolder(folder).issue_user(name, role, days))


@certs.command()
def request(
    name: NodeName,
    folder: Annotated[Path, typer.Option("--dir", help="Where to write key and request.")] = Path(
        "node"
    ),
    host: Hosts = None,
) -> None:
    """On a node: make its keys, which stay here, and a request for its certificate.

    Send node.csr to the authority for `flwr-distill certs sign`, and read it the fingerprint and
    each --host over another channel: who signs gives them too. Put what comes back, node.crt,
    ca.crt and nodes-ca.crt, beside the keys.
    """
    with exit_on(CertificateError, command="certs"):
        fingerprint = request_node(folder, name, host or [])
    typer.echo(f"{folder / 'node.csr'}: for {name}, send it to the authority; key {fingerprint}")


@certs.command()
def sign(
    file: Annotated[
        typer.FileBinaryRead, typer.Argument(help="node.csr of `certs request`; - for stdin.")
    ],
    folder: CertificatesDir = DEFAULT_CERTIFICATES_DIR,
    fingerprint: Annotated[
        str | None, typer.Option("--fingerprint", help="Refuse a request with another key.")
    ] = None,
    host: Hosts = None,
    days: Days = 30,
) -> None:
    """At the authority: issue the certificate that a node asks for, into a folder with its name.

    Compare the fingerprint with what `certs request` printed on the node. Other nodes reach it at
    each --host, else at its name; a request that names any other host is refused, and the
    SuperLink's hosts are never a node's. Send ca.crt, nodes-ca.crt and node.crt to the node, and
    register it with the SuperLink by `flwr-distill register`.
    """
    with exit_on(CertificateError, command="certs"):
        content = file.read(_LARGEST_REQUEST)
        issued = CertificateFolder(folder).sign(content, days, host or [], fingerprint)
    typer.echo(f"{_told(folder, issued)}; key {issued.fingerprint}")


@certs.command()
def renew(
    name: Annotated[str, typer.Argument(help="Name of the node, or server.")],
    folder: CertificatesDir = DEFAULT_CERTIFICATES_DIR,
    days: Days = 30,
) -> None:
    """Issue a new certificate for the same key and hosts, in place of the last one.

    Put node.crt in the place of the node's: the node takes it without a restart. A SuperLink takes
    its server.crt when it is started again.
    """
    with exit_on(CertificateError, command="certs"):
        issued = CertificateFolder(folder).renew(name, days)
    typer.echo(_told(folder, issued))


@certs.command("list")
def list_issued(folder: CertificatesDir = DEFAULT_CERTIFICATES_DIR) -> None:
    """List the certificates, with expiry and revocation."""
    table = Table("name", "hosts or role", "expires", "revoked")
    with exit_on(CertificateError, command="certs"):
        for each in CertificateFolder(folder).issued():
            purpose = each.role or " ".join(each.hosts)
            table.add_row(each.name, purpose, each.expires, each.revoked or "-")
    Console().print(table)


@certs.command()
def revoke(
    name: Annotated[str, typer.Argument(help="Name of the node, or server.")],
    folder: CertificatesDir = DEFAULT_CERTIFICATES_DIR,
    superlink: ControlAddress = "127.0.0.1:9093",
    user_certificate: UserCertificate = None,
    user_key: UserKey = None,
    timeout: Timeout = 60.0,
) -> None:
    """Shut a node out: the SuperLink no longer admits its key, and `list` shows it as revoked.

    The server introduces only registered nodes to each other. Nodes that have nodes-ca.crl, which
    this writes, as --peer-revocations take no parcel from it either, whatever the server says.
    """
    from flwr_distill.flower.line_1_32.fleet.registration import SecureControl  # imports Flower
    from flwr_distill.flower.line_1_32.fleet.superlink import SuperLinkError

    authority = CertificateFolder(folder)
    user = user_of(user_certificate, user_key, "certs")
    with exit_on(CertificateError, command="certs"):
        issued = authority.valid(name)
        if issued is None:
            raise CertificateError(f"{folder} has issued no {name}, or it is revoked already")
        if issued.is_node:
            try:
                with SecureControl(superlink, authority.certificate, user) as control:
                    control.wait(timeout)
                    node_id = control.node_id(issued.registered_key)
                    if node_id is not None:
                        control.unregister(node_id)
            except SuperLinkError as error:
                raise CertificateError(f"{name} is not revoked: {error}") from error
        authority.mark_revoked(name)
    lists = f"nodes {authority.nodes_revocations}, and a gate {authority.revocations}"
    typer.echo(f"{name} is revoked; give {lists}, as they are now")


def _issue(folder: Path, name: str, keep: bool, days: int, issue: Callable[[], Issued]) -> None:
    authority = CertificateFolder(folder)
    with exit_on(CertificateError, command="certs"):
        last = authority.valid(name) if keep else None
        if last is None:
            issued = issue()
        elif last.days_left > _RENEWED_WITHIN and not authority.is_outdated(last):
            typer.echo(f"{folder / name} is kept")
            return
        else:
            issued = authority.renew(name, days)
    typer.echo(_told(folder, issued))


def _told(folder: Path, issued: Issued) -> str:
    purpose = issued.role or ", ".join(issued.hosts)
    return f"{folder / issued.name}: for {purpose}, until {issued.expires}"
