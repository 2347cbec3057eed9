"""`flwr-distill down`: end a local federation."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import typer

from cli.errors import fail
from cli.options import DEFAULT_FEDERATION_DIR, FederationDir
from fleet.federation_record import FederationFile


def down(state_dir: FederationDir = DEFAULT_FEDERATION_DIR) -> None:
    """End the local federation that `up` started in this state directory, and wait for its end."""
    file = FederationFile(state_dir)
    record = file.read()
    if record is None:
        typer.echo(f"no federation runs in {state_dir}")
        return
    with suppress(ProcessLookupError):
        os.kill(record.pid, signal.SIGTERM)
    deadline = time.monotonic() + 30
    while file.read() is not None:
        if time.monotonic() > deadline:
            remedy = f"kill it with `kill -9 {record.pid}`, its children end with it"
            fail(f"process {record.pid} does not end: {remedy}", "down")
        time.sleep(0.1)
    typer.echo("the federation has ended")
