"""`flwr-distill doctor`: check this machine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from flwr_distill.cli.options import (
    AuthKey,
    Device,
    FleetAddress,
    Insecure,
    NodeConfigFile,
    PeerAddress,
    PeerAuthority,
    PeerCertificate,
    PeerKey,
    RootCertificates,
    StateDir,
)
from flwr_distill.node.settings import NodeError, NodeSettings, load_settings

if TYPE_CHECKING:
    from flwr_distill.fleet.checkup import Finding


def doctor(
    context: typer.Context,
    config: NodeConfigFile = None,
    superlink: FleetAddress = None,
    insecure: Insecure = None,
    root_certificates: RootCertificates = None,
    auth_key: AuthKey = None,
    peer_address: PeerAddress = None,
    peer_authority: PeerAuthority = None,
    peer_certificate: PeerCertificate = None,
    peer_key: PeerKey = None,
    device: Device = None,
    state_dir: StateDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this machine before it becomes a node or a server: each line is ok or has a remedy.

    Checks versions, driver, every GPU (for 2 seconds), disk and certificates. With --superlink it
    checks the SuperLink's answer and clock, without it a server's ports. Options are those of the
    future node. Exits with 1 if something failed.
    """
    from flwr_distill.fleet.checkup import Finding, checkup  # imports torch

    options = {k: v for k, v in context.params.items() if k not in ("config", "as_json")}

    def findings() -> Iterator[Finding]:
        try:
            settings = load_settings(config, options)
        except NodeError as error:
            yield Finding("settings", "failed", str(error), "the rest is checked without them")
            settings = NodeSettings()
        yield from checkup(settings)

    checked = list(findings() if as_json else _shown(findings()))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in checked], indent=2))
    if any(finding.state == "failed" for finding in checked):
        raise typer.Exit(1)


def _shown(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Print each finding immediately: some take seconds."""
    for finding in findings:
        typer.echo(f"{finding.state:<10}{finding.check:<18}{finding.found}")
        if finding.remedy:
            typer.echo(f"{'':<28}-> {finding.remedy}")
        yield finding
