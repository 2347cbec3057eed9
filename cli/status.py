"""`flwr-distill status`: the processes of a local federation."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from flwr_distill.cli.options import DEFAULT_FEDERATION_DIR, FederationDir
from flwr_distill.fleet.federation_record import FederationFile
from flwr_distill.node.supervisor import status_file


def status(state_dir: FederationDir = DEFAULT_FEDERATION_DIR) -> None:
    """Show the processes of a local federation; exit with 1 if none runs."""
    record = FederationFile(state_dir).read()
    if record is None:
        typer.echo(f"no federation runs in {state_dir}", err=True)
        raise typer.Exit(1)
    typer.echo(
        f"SuperLink: Control API at {record.control_address}, FLWR_HOME={record.flower_home}"
    )
    table = Table("node", "state", "device", "pid", "SuperNode", "executor", "worker")
    columns = ("device", "pid", "supernode", "executor", "worker")
    for directory in map(Path, record.node_dirs):
        parts = _node(directory)
        state = "online" if "online" in parts else "starting" if parts else "down"
        if "ready" in parts:
            state += ", warm" if "worker" in parts else ", resting"
        table.add_row(
            directory.name,
            state,
            *(str(parts.get(name, "-")) for name in columns),
        )
    Console().print(table)


def _node(state_dir: Path) -> dict[str, Any]:
    """Read a node's status file; empty if the node does not run."""
    try:
        parts: dict[str, Any] = json.loads(status_file(state_dir).read_text(encoding="utf-8"))
        os.kill(parts["pid"], 0)
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return parts
