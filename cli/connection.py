"""The SuperLink of a command: that of the local federation, or a named one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from flwr_distill.cli.errors import fail
from flwr_distill.fleet.federation_record import FederationFile, FederationRecord
from flwr_distill.flower.control import Control, SuperLinkError, User, open_control

DEFAULT_ADDRESS = "127.0.0.1:9093"
DEFAULT_AUTHORITY = Path("certs/ca.crt")

Address = Annotated[
    str | None,
    typer.Option(
        "--superlink",
        metavar="HOST:PORT",
        help="SuperLink's Control API.",
        show_default=f"the local federation's, else {DEFAULT_ADDRESS}",
    ),
]
Authority = Annotated[
    Path | None,
    typer.Option(
        "--root-certificates",
        help="PEM file of the SuperLink's authority.",
        show_default=str(DEFAULT_AUTHORITY),
        exists=True,
    ),
]
UserCertificate = Annotated[
    Path | None,
    typer.Option(
        "--user-certificate",
        help="PEM file of your certificate (flwr-distill certs user), if a gate requires it.",
        envvar="FLWR_DISTILL_USER_CERTIFICATE",
        exists=True,
    ),
]
UserKey = Annotated[
    Path | None,
    typer.Option(
        "--user-key",
        help="PEM file of that certificate's private key.",
        envvar="FLWR_DISTILL_USER_KEY",
        exists=True,
    ),
]
ControlAddress = Annotated[
    str, typer.Option("--superlink", help="SuperLink's Control API, host:port.")
]
Timeout = Annotated[
    float, typer.Option("--timeout", min=0, help="Seconds to wait for the SuperLink.")
]
NoTls = Annotated[bool, typer.Option("--insecure", help="The SuperLink has no TLS.")]


@dataclass(frozen=True)
class Connection:
    """How to reach a SuperLink; `federation` is its local federation, if it has one."""

    address: str
    authority: Path | None
    federation: FederationRecord | None
    is_up: Callable[[], bool]
    user: User | None = None

    def open(self, timeout: float) -> Control:
        """Open the Control API once the SuperLink answers, or raise a `SuperLinkError`."""
        link = open_control(self.address, self.authority, self.user)
        link.wait(timeout, is_up=self.is_up)
        return link


def user_of(certificate: Path | None, key: Path | None, command: str) -> User | None:
    """The calling user; None without files. Ends the command if one of the two is missing."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        fail("user-certificate and user-key must be given together", command)
    return User(certificate, key)


def find_superlink(
    address: str | None,
    authority: Path | None,
    insecure: bool,
    user: User | None,
    state_dir: Path,
    command: str,
) -> Connection:
    """Find the SuperLink; without options, that of the local federation.

    Ends the command if the options exclude each other, or there is no SuperLink.
    """
    if insecure and authority is not None:
        fail("insecure and root-certificates exclude each other: drop one", command)
    file = FederationFile(state_dir)
    if address is None and authority is None and not insecure:
        if record := file.read():
            return Connection(record.control_address, None, record, lambda: file.read() is not None)
        if not DEFAULT_AUTHORITY.exists():
            remedy = "start one with `flwr-distill up`, or name a SuperLink with --superlink and "
            remedy += "--root-certificates or --insecure"
            fail("no federation runs here", command, where=state_dir, remedy=remedy)
    if not insecure and authority is None and not DEFAULT_AUTHORITY.exists():
        remedy = "name the file of the SuperLink's authority, or give --insecure if it has no TLS"
        missing = str(DEFAULT_AUTHORITY)
        fail("does not exist", command, where="root-certificates", value=missing, remedy=remedy)
    return Connection(
        address or DEFAULT_ADDRESS,
        None if insecure else authority or DEFAULT_AUTHORITY,
        None,
        lambda: True,
        user,
    )


def lasting(link: Connection, state_dir: Path, timeout: float) -> Callable[[], Control]:
    """Opens the Control API; that of a local federation wherever it is after a restart.

    The SuperLink may take `timeout` seconds to answer, else a `SuperLinkError` is raised.
    """

    def opened() -> Control:
        if link.federation is None:
            return link.open(timeout)
        if (record := FederationFile(state_dir).read()) is None:
            remedy = "start it again with `flwr-distill up`"
            raise SuperLinkError("no federation runs here", where=state_dir, remedy=remedy)
        control = open_control(record.control_address)
        control.wait(timeout)
        return control

    return opened
