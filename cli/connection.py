"""The SuperLink of a command: that of the local federation, or a named one."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from flwr_distill.cli.errors import fail
from flwr_distill.cli.options import (
    DEFAULT_FEDERATION_DIR,
    FederationDir,
    state_dir_option,
    with_options,
)
from flwr_distill.fleet.certificates import CertificateFolder
from flwr_distill.fleet.federation_record import FederationFile, FederationRecord
from flwr_distill.flower.control import Control, SuperLinkError, User, open_control

DEFAULT_ADDRESS = "127.0.0.1:9093"
DEFAULT_AUTHORITY = Path("certs/ca.crt")

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
Timeout = Annotated[
    float, typer.Option("--timeout", min=0, help="Seconds to wait for the SuperLink.")
]


@dataclass(frozen=True)
class Connection:
    """How to reach a SuperLink; `federation` is its local federation, if it has one.

    `given` has the options that name it, to append to another command.
    """

    address: str
    authority: Path | None
    federation: FederationRecord | None
    is_up: Callable[[], bool]
    user: User | None = None
    given: str = ""

    def open(self, timeout: float) -> Control:
        """Open the Control API once the SuperLink answers, or raise a `SuperLinkError`."""
        link = open_control(self.address, self.authority, self.user)
        link.wait(timeout, is_up=self.is_up)
        return link


@dataclass(frozen=True)
class SuperLinkOptions:
    """Options of a command that name a SuperLink; without them, that of the local federation."""

    superlink: Annotated[
        str | None,
        typer.Option(
            "--superlink",
            metavar="HOST:PORT",
            help="SuperLink's Control API.",
            show_default=f"the local federation's, else {DEFAULT_ADDRESS}",
        ),
    ] = None
    root_certificates: Annotated[
        Path | None,
        typer.Option(
            "--root-certificates",
            help="PEM file of the SuperLink's authority.",
            show_default=str(DEFAULT_AUTHORITY),
            exists=True,
        ),
    ] = None
    user_certificate: UserCertificate = None
    user_key: UserKey = None
    insecure: Annotated[bool, typer.Option("--insecure", help="The SuperLink has no TLS.")] = False
    state_dir: FederationDir = DEFAULT_FEDERATION_DIR

    @property
    def name_one(self) -> bool:
        """Whether they name a SuperLink."""
        return self.insecure or self.superlink is not None or self.root_certificates is not None

    def find(self, command: str) -> Connection:
        """Find the SuperLink.

        Ends the command if the options exclude each other, or there is no SuperLink.
        """
        user = _user(self.user_certificate, self.user_key, command)
        if self.insecure and self.root_certificates:
            fail("insecure and root-certificates exclude each other: drop one", command)
        file = FederationFile(self.state_dir)
        if not self.name_one:
            if record := file.read():
                return Connection(
                    record.control_address,
                    None,
                    record,
                    lambda: file.read() is not None,
                    given=state_dir_option(self.state_dir),
                )
            if not DEFAULT_AUTHORITY.exists():
                remedy = "start one with `flwr-distill up`, or name a SuperLink with --superlink "
                remedy += "and --root-certificates or --insecure"
                fail("no federation runs here", command, where=self.state_dir, remedy=remedy)
        authority = None if self.insecure else self.root_certificates or DEFAULT_AUTHORITY
        if authority and not authority.exists():
            remedy = (
                "name the file of the SuperLink's authority, or give --insecure if it has no TLS"
            )
            missing = str(authority)
            fail("does not exist", command, where="root-certificates", value=missing, remedy=remedy)
        address = self.superlink or DEFAULT_ADDRESS
        return Connection(address, authority, None, lambda: True, user, self._given())

    def _given(self) -> str:
        """The options that were given for a named SuperLink."""
        files = {
            "root-certificates": self.root_certificates,
            "user-certificate": self.user_certificate,
            "user-key": self.user_key,
        }
        texts = [
            f"--superlink {self.superlink}" if self.superlink else "",
            "--insecure" if self.insecure else "",
            *(f"--{name} {shlex.quote(str(file))}" for name, file in files.items() if file),
        ]
        return "".join(f" {text}" for text in texts if text)


@dataclass(frozen=True)
class RegistrationOptions:
    """Options of a command that registers nodes with the SuperLink of a certificates folder."""

    superlink: Annotated[
        str, typer.Option("--superlink", help="SuperLink's Control API, host:port.")
    ] = DEFAULT_ADDRESS
    user_certificate: UserCertificate = None
    user_key: UserKey = None
    timeout: Timeout = 60.0

    def open(self, authority: CertificateFolder, command: str) -> Control:
        """Open the Control API once the SuperLink answers, or raise a `SuperLinkError`."""
        user = _user(self.user_certificate, self.user_key, command)
        control = open_control(self.superlink, authority.certificate, user, authority.noted_ids)
        control.wait(self.timeout)
        return control


with_superlink = with_options("options", SuperLinkOptions)
"""Give a command these options, in its parameter `options`."""
with_registration = with_options("options", RegistrationOptions)


def _user(certificate: Path | None, key: Path | None, command: str) -> User | None:
    """The calling user; None without files. Ends the command if one of the two is missing."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        fail("user-certificate and user-key must be given together", command)
    return User(certificate, key)


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
