"""`flwr-distill doctor`: check this machine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flwr_distill.cli.options import NodeConfigFile, with_node_options
from flwr_distill.node.settings import NodeError, NodeSettings, load_settings

if TYPE_CHECKING:
    from flwr_distill.fleet.checkup import Finding


@with_node_options(
    *("superlink", "insecure", "root_certificates", "auth_key", "peer_address", "peer_authority"),
    *("peer_certificate", "peer_key", "device", "state_dir"),
)
def doctor(
    settings: dict[str, Any],
    config: NodeConfigFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this machine before it becomes a node or a server: each line is ok or has a remedy.

    Checks versions, driver, every GPU (for 2 seconds), disk and certificates. With --superlink it
    checks the SuperLink's answer and clock, without it a server's ports. Options are those of the
    future node. Exits with 1 if something failed.
    """
    from flwr_distill.fleet.checkup import Finding, checkup  # imports torch

    def findings() -> Iterator[Finding]:
        try:
            checked = load_settings(config, settings)
        except NodeError as error:
            yield Finding("settings", "failed", str(error), "the rest is checked without them")
            checked = NodeSettings()
        yield from checkup(checked)

    shown = list(findings() if as_json else _shown(findings()))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in shown], indent=2))
    if any(finding.state == "failed" for finding in shown):
        raise typer.Exit(1)


def _shown(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Print each finding immediately: some take seconds."""
    for finding in findings:
        typer.echo(f"{finding.state:<10}{finding.check:<18}{finding.found}")
        if finding.remedy:
            typer.echo(f"{'':<28}-> {finding.remedy}")
        yield finding
