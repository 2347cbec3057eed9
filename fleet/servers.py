"""The processes that serve a federation: a SuperLink, and the one that starts its ServerApps."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from flwr_distill.fleet.serverapp import program
from flwr_distill.node.stock import (
    CONTROL_OVER_HTTP,
    FLEET_OVER_HTTP,
    OVER_HTTP,
    QUIET,
    installed_line,
)

RUNTIME = (1, 36)
"""Since this Flower, the API for apps is called the Runtime API."""
NO_PLUGINS = (1, 38)
"""Since this Flower, one process starts apps of all kinds."""


@dataclass(frozen=True)
class Addresses:
    """Where a SuperLink listens: for nodes, for users who submit runs, and for its ServerApps."""

    fleet: str
    control: str
    serverappio: str

    @classmethod
    def beside(cls, fleet: str, control: int, serverappio: int) -> Addresses:
        """Others on loopback, beside one for nodes; newer Flowers have fewer.

        From Flower 1.37 on users have the port of ServerApps, and from 1.40 on that of nodes, too.
        """
        if installed_line() >= FLEET_OVER_HTTP:
            near = fleet.replace("0.0.0.0", "127.0.0.1")
            return cls(fleet, near, near)
        apps = f"127.0.0.1:{serverappio}"
        own = installed_line() < CONTROL_OVER_HTTP
        return cls(fleet, f"127.0.0.1:{control}" if own else apps, apps)


@dataclass(frozen=True)
class ServerCertificate:
    """Files (PEM) of a SuperLink's certificate, as `flwr-distill certs server` makes them."""

    authority: Path
    certificate: Path
    key: Path


def environment(flower_home: Path) -> dict[str, str]:
    """Environment of this process, with a Flower home, and the commands beside this Python.

    ServerApps are started by our program, which is written into the home.
    """
    programs = flower_home / "programs"
    programs.mkdir(parents=True, exist_ok=True)
    folders = [program(programs).parent, Path(sys.executable).parent]
    path = os.pathsep.join([*map(str, folders), os.environ.get("PATH", os.defpath)])
    return {**os.environ, **QUIET, "PATH": path, "FLWR_HOME": str(flower_home)}


def by_name(address: str) -> str:
    """An address on loopback by the name that a server's certificate has."""
    return address.replace("127.0.0.1", "localhost")


def listen_once(address: str) -> None:
    """Listen at an address for a moment; OSError if no server can."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host.strip("[]"), int(port)), family=family).close()
    except OverflowError as error:
        raise OSError(str(error)) from error


def why_not_free(address: str) -> str:
    """Why no server can listen at an address; '' if one can."""
    try:
        listen_once(address)
    except OSError as error:
        return f"{address} cannot be used: {error}"
    return ""


def write_connection(flower_home: Path, name: str, control_address: str) -> None:
    """Write the configuration by which ``flwr`` commands reach a SuperLink without TLS."""
    flower_home.mkdir(parents=True, exist_ok=True)
    (flower_home / "config.toml").write_text(
        f'[superlink]\ndefault = "{name}"\n\n'
        f'[superlink.{name}]\naddress = "{control_address}"\ninsecure = true\n',
        encoding="utf-8",
    )


def superlink_command(
    addresses: Addresses, secret: Path, certificate: ServerCertificate | None, database: Path | None
) -> list[str]:
    """The command of a SuperLink whose ServerApps are started by another process.

    A SuperLink that starts them itself has no secret, and any user could claim its tasks. With a
    certificate it uses TLS, and admits only registered nodes. Its state and the messages that pass
    through it are in the database, else in memory.
    """
    tls = ["--insecure"]
    if certificate is not None:
        tls = [
            *("--enable-supernode-auth", "--ssl-ca-certfile", str(certificate.authority)),
            *("--ssl-certfile", str(certificate.certificate)),
            *("--ssl-keyfile", str(certificate.key)),
        ]
    return [
        *(sys.executable, "-P", "-m", "flwr_distill.command", "superlink", *tls),
        "--disable-runtime-dependency-installation",
        *(*listening_arguments(addresses), "--isolation", "process"),
        *(("--database", str(database)) if database else ()),
        *("--superexec-auth-secret-file", str(secret)),
    ]


def listening_arguments(addresses: Addresses) -> list[str]:
    """The arguments of the installed Flower's SuperLink for where it listens."""
    if installed_line() < OVER_HTTP:
        arguments = ["--serverappio-api-address", addresses.serverappio]
    else:
        both = installed_line() >= FLEET_OVER_HTTP
        host, _, port = (addresses.fleet if both else addresses.serverappio).rpartition(":")
        arguments = ["--host", host, "--port", port]
    if installed_line() < CONTROL_OVER_HTTP:
        arguments += ["--control-api-address", addresses.control]
    if installed_line() < FLEET_OVER_HTTP:
        arguments += ["--fleet-api-address", addresses.fleet]
    return arguments


def serverapps_command(
    addresses: Addresses, secret: Path, superlink: int, certificate: ServerCertificate | None = None
) -> list[str]:
    """The command that starts ServerApps; it ends with the SuperLink of this process id.

    On loopback a SuperLink serves them without TLS, until they have the port of users.
    """
    api, address = "--runtime-api-address", addresses.serverappio
    if installed_line() < RUNTIME:
        api = "--appio-api-address"
    tls = ["--insecure"]
    if certificate is not None and installed_line() >= CONTROL_OVER_HTTP:
        tls = ["--root-certificates", str(certificate.authority)]
        address = by_name(address)
    return [
        *("flower-superexec", *tls),
        *(("--plugin-type", "serverapp") if installed_line() < NO_PLUGINS else ()),
        *(api, address, "--parent-pid", str(superlink)),
        *("--superexec-auth-secret-file", str(secret)),
    ]
