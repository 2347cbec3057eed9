"""`flwr-distill certs`: the certificate authorities of a federation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from flwr_distill.cli.connection import RegistrationOptions, with_registration
from flwr_distill.cli.errors import exit_on
from flwr_distill.cli.options import DEFAULT_CERTIFICATES_DIR, CertificatesDir
from flwr_distill.fleet.authority import CertificateError
from flwr_distill.fleet.certificates import CertificateFolder, Issued, Role
from flwr_distill.fleet.node_request import SERVER, request_node
from flwr_distill.flower.control import SuperLinkError

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
    typer.Option("--keep", help="Keep an existing one; renew it in its last ten days."),
]
NodeName = Annotated[str, typer.Argument(help="Name of the node, as in node-0.")]

MAX_REQUEST_BYTES = 2**16
RENEW_WITHIN_DAYS = 10


@certs.command()
def init(
    folder: CertificatesDir = DEFAULT_CERTIFICATES_DIR, days: Days = 3650, keep: Keep = False
) -> None:
    """Make the authorities: ca.crt for every machine, nodes-ca.crt for nodes; keys stay here."""
    authority = CertificateFolder(folder)
    with exit_on(CertificateError, command="certs"):
        if keep and authority.certificate.exists():
            typer.echo(f"{authority.certificate} is kept")
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

    Give each name and address of the SuperLink for nodes and users as --host.
    """
    if not host:
        raise typer.BadParameter("give at least one", param_hint="--host")
    issue = partial(CertificateFolder(folder).issue_server, host, days)
    _issue(folder, SERVER, keep, days, issue)


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
    (--peer-authority), node.crt (--peer-certificate) and node.key (--peer-key). --host is its
    address for other nodes, as in --peer-address; the default is its name. Then register it with
    `flwr-distill register`.

    Here the authority knows the node's keys. With `request` and `sign` it does not.
    """
    issue = partial(CertificateFolder(folder).issue_node, name, host or [], days)
    _issue(folder, name, keep, days, issue)


@certs.command()
def user(
    name: Annotated[str, typer.Argument(help="Name of a person or a service.")],
    role: Annotated[
        Role,
        typer.Option(
            help="viewer: sees runs, logs and nodes; submitter: also starts and stops runs; "
            "operator: everything, such as registering nodes."
        ),
    ],
    folder: CertificatesDir = DEFAULT_CERTIFICATES_DIR,
    days: Days = 30,
    keep: Keep = False,
) -> None:
    """Issue a user's key and certificate, for the gate in front of the Control API.

    Commands take them as --user-certificate and --user-key. docker/gate/nginx.conf has the roles;
    docs/deploy.md shows how to start the gate.
    """
    issue = partial(CertificateFolder(folder).issue_user, name, role, days)
    _issue(folder, name, keep, days, issue)


@certs.command()
def request(
    name: NodeName,
    folder: Annotated[Path, typer.Option("--dir", help="Where to write key and request.")] = Path(
        "node"
    ),
    host: Hosts = None,
) -> None:
    """On a node: make its keys, which stay here, and a request for its certificate.

    Send node.csr to the authority for `flwr-distill certs sign`. Report the fingerprint and each
    --host over another channel; the signer must give them too. Put the returned node.crt, ca.crt
    and nodes-ca.crt beside the keys.
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
    """At the authority: issue a requested certificate, into a folder with the node's name.

    Compare the fingerprint with the one that `certs request` printed on the node. --host is the
    node's address for other nodes; the default is its name. A request with any other host is
    refused, and so are the SuperLink's hosts. Send ca.crt, nodes-ca.crt and node.crt to the node,
    and register it with `flwr-distill register`.
    """
    with exit_on(CertificateError, command="certs"):
        content = file.read(MAX_REQUEST_BYTES)
        issued = CertificateFolder(folder).sign(content, days, host or [], fingerprint)
    typer.echo(f"{_summary(folder, issued)}; key {issued.fingerprint}")


@certs.command()
def renew(
    name: Annotated[str, typer.Argument(help="Name of the node, or server.")],
    folder: CertificatesDir = DEFAULT_CERTIFICATES_DIR,
    days: Days = 30,
) -> None:
    """Issue a new certificate for the same key and hosts, in place of the last one.

    Copy node.crt over the node's: the node uses it without a restart. A SuperLink loads server.crt
    when it restarts.
    """
    with exit_on(CertificateError, command="certs"):
        issued = CertificateFolder(folder).renew(name, days)
    typer.echo(_summary(folder, issued))


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
@with_registration
def revoke(
    *,
    name: Annotated[str, typer.Argument(help="Name of the node, or server.")],
    folder: CertificatesDir = DEFAULT_CERTIFICATES_DIR,
    options: RegistrationOptions,
) -> None:
    """Shut a node out: the SuperLink no longer admits its key, and `list` shows it as revoked.

    The server introduces only registered nodes to each other. This also writes nodes-ca.crl. Nodes
    with this file as --peer-revocations reject the node's parcels, whatever the server says.
    """
    authority = CertificateFolder(folder)
    with exit_on(CertificateError, command="certs"):
        issued = authority.valid(name)
        if issued is None:
            raise CertificateError(f"{folder} has issued no {name}, or has revoked it already")
        if issued.is_node:
            try:
                with options.open(authority, "certs") as control:
                    node_id = control.node_id(issued.login_key)
                    if node_id is not None:
                        control.unregister(node_id)
            except SuperLinkError as error:
                raise CertificateError(f"{name} is not revoked: {error}") from error
        authority.mark_revoked(name)
    lists = f"{authority.nodes_revocations} to nodes and {authority.revocations} to a gate"
    typer.echo(f"{name} is revoked; copy {lists}")


def _issue(folder: Path, name: str, keep: bool, days: int, issue: Callable[[], Issued]) -> None:
    authority = CertificateFolder(folder)
    with exit_on(CertificateError, command="certs"):
        last = authority.valid(name) if keep else None
        if last is None:
            issued = issue()
        elif last.days_left > RENEW_WITHIN_DAYS:
            typer.echo(f"{folder / name} is kept")
            return
        else:
            issued = authority.renew(name, days)
    typer.echo(_summary(folder, issued))


def _summary(folder: Path, issued: Issued) -> str:
    purpose = issued.role or ", ".join(issued.hosts)
    return f"{folder / issued.name}: for {purpose}, until {issued.expires}"
