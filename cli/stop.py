"""`flwr-distill stop`: end a local federation, or a run."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from flwr_distill.base.text import listed
from flwr_distill.cli.connection import (
    Address,
    Authority,
    NoTls,
    UserCertificate,
    UserKey,
    find_superlink,
    user_of,
)
from flwr_distill.cli.errors import exit_on, fail
from flwr_distill.cli.options import DEFAULT_FEDERATION_DIR, FederationDir
from flwr_distill.fleet.federation_record import FederationFile
from flwr_distill.server.record.run_ids import LATEST, RunIdError, full_id


def stop(
    run: Annotated[
        str,
        typer.Argument(
            help="Id of a run or its first digits, or latest.", show_default="the federation"
        ),
    ] = "",
    superlink: Address = None,
    root_certificates: Authority = None,
    user_certificate: UserCertificate = None,
    user_key: UserKey = None,
    insecure: NoTls = False,
    state_dir: FederationDir = DEFAULT_FEDERATION_DIR,
) -> None:
    """End the federation that `flwr-distill up` started; with RUN, only that run.

    The options for a SuperLink are those of `flwr-distill run`, and serve to stop a run.
    """
    if not run:
        _end_federation(state_dir)
        return
    user = user_of(user_certificate, user_key, "stop")
    link = find_superlink(superlink, root_certificates, insecure, user, state_dir, "stop")

    from flwr_distill.flower.line_1_32.fleet.superlink import SuperLinkError  # here: imports Flower

    with exit_on(SuperLinkError, command="stop"), link.open(timeout=10.0) as control:
        running = [str(run_id) for run_id in control.unfinished_runs()]
        if run == LATEST and not running:
            fail("no run is running", "stop")
        try:
            run_id = full_id(run, running)
        except RunIdError as error:
            fail(f"{error}; running: {listed(running) if running else 'none'}", "stop")
        control.stop_run(int(run_id))
    typer.echo(f"run {run_id} is stopped")


def _end_federation(state_dir: Path) -> None:
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
            fail(f"process {record.pid} does not end: {remedy}", "stop")
        time.sleep(0.1)
    typer.echo("the federation has ended")
