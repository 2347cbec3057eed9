"""The processes that serve a federation: a SuperLink, and what starts its ServerApps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
"""Environment in which Flower tells nobody that it runs."""


@dataclass(frozen=True)
class Addresses:
    """Where a SuperLink listens: for nodes, for who submits runs, and for its ServerApps."""

    fleet: str
    control: str
    serverappio: str


@dataclass(frozen=True)
class ServerCertificate:
    """Files (PEM) of a SuperLink's certificate, as `flwr-distill certs server` makes them."""

    authority: Path
    certificate: Path
    key: Path


def superlink_command(
    addresses: Addresses, secret: Path, certificate: ServerCertificate | None, database: Path | None
) -> list[str]:
    """The command of a SuperLink whose ServerApps are started by another process.

    A SuperLink that starts them itself has no secret, and any user could claim its tasks.

    Parameters
    ----------
    secret : Path
        File of what claims of tasks are signed with.
    certificate : ServerCertificate, optional
        For TLS; only registered nodes are then admitted. None: no TLS, and any node.
    database : Path, optional
        File for its state and the messages that pass through it. None: in memory.
    """
    tls = ["--insecure"]
    if certificate is not None:
        tls = [
            *("--enable-supernode-auth", "--ssl-ca-certfile", str(certificate.authority)),
            *("--ssl-certfile", str(certificate.certificate)),
            *("--ssl-keyfile", str(certificate.key)),
        ]
    return [
        *("flwr-distill", "superlink", *tls, "--disable-runtime-dependency-installation"),
        *("--fleet-api-address", addresses.fleet),
        *("--control-api-address", addresses.control),
        *("--serverappio-api-address", addresses.serverappio, "--isolation", "process"),
        *(("--database", str(database)) if database else ()),
        *("--superexec-auth-secret-file", str(secret)),
    ]


def serverapps_command(addresses: Addresses, secret: Path, superlink: int) -> list[str]:
    """The command of what starts ServerApps, and ends with the SuperLink of this process id."""
    return [
        *("flower-superexec", "--insecure", "--plugin-type", "serverapp"),
        *("--appio-api-address", addresses.serverappio, "--parent-pid", str(superlink)),
        *("--superexec-auth-secret-file", str(secret)),
    ]
