"""`flwr-distill dashboard`: a web page of a federation."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from flwr_distill.cli.connection import SuperLinkOptions, lasting, with_superlink
from flwr_distill.cli.errors import exit_on, fail
from flwr_distill.cli.options import DEFAULT_CERTIFICATES_DIR
from flwr_distill.cli.run_folders import DEFAULT_RUNS_DIR
from flwr_distill.task.errors import ReportedError

DEFAULT_PORT = 8080
ANSWER = 5.0
"""Seconds for which a SuperLink may keep an answer back."""
_SCREENS = ("DISPLAY", "WAYLAND_DISPLAY", *(("HOME",) if sys.platform == "darwin" else ()))
"""Variables of a desktop; elsewhere a browser would be one of the terminal."""


@with_superlink
def dashboard(
    *,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port.")] = DEFAULT_PORT,
    open_it: Annotated[
        bool, typer.Option("--open", help="Open it in a browser, where there is a screen.")
    ] = False,
    allow_actions: Annotated[
        bool,
        typer.Option("--allow-actions", help="Let users submit, stop, resume and export runs."),
    ] = False,
    options: SuperLinkOptions,
    runs_dir: Annotated[
        Path | None,
        typer.Option(help="Folder of the runs' folders.", show_default="the federation's, or runs"),
    ] = None,
    certs: Annotated[
        Path,
        typer.Option(help="The authority's folder, for names of nodes and dates of certificates."),
    ] = DEFAULT_CERTIFICATES_DIR,
    node_state_dir: Annotated[
        list[Path] | None,
        typer.Option(help="State directory of a node of this machine, for its outbox; repeat it."),
    ] = None,
    ssl_certfile: Annotated[
        Path | None, typer.Option(help="Beyond loopback: the server's certificate.")
    ] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Its private key.")] = None,
    ssl_ca_certfile: Annotated[
        Path | None, typer.Option(help="The authority of users' certificates.")
    ] = None,
    ssl_crlfile: Annotated[Path | None, typer.Option(help="The authority's revocations.")] = None,
    plain_http: Annotated[
        bool,
        typer.Option(
            "--plain-http",
            help="Beyond loopback without TLS and roles: anyone who reaches it sees all.",
        ),
    ] = False,
) -> None:
    """Serve a web page of a federation: nodes, queue, live runs, reports, health.

    On loopback all users of this machine see it. Elsewhere it needs TLS, and admits users by their
    certificates (flwr-distill certs user): viewers see, submitters act where --allow-actions is
    given, and operators also see what left this machine's nodes.
    """
    link = options.find("dashboard")
    files = (ssl_certfile, ssl_keyfile, ssl_ca_certfile, ssl_crlfile)
    if any(files) and not all(files):
        fail("the four --ssl options must be given together", "dashboard")

    from flwr_distill.fleet.dashboard.access import Tls
    from flwr_distill.fleet.dashboard.serve import serve
    from flwr_distill.fleet.dashboard.watch import Place

    if runs_dir is None:
        folder = Path(link.federation.working_dir) if link.federation else Path()
        runs_dir = folder / DEFAULT_RUNS_DIR
    place = Place(
        superlink=link.address,
        control=lasting(link, options.state_dir, ANSWER),
        runs_dir=runs_dir.absolute(),
        state_dir=options.state_dir,
        certs=certs,
        node_dirs=node_state_dir or (),
    )

    def ready(address: str) -> None:
        typer.echo(f"dashboard: {address}")
        if open_it and any(name in os.environ for name in _SCREENS):
            webbrowser.open(address)

    with exit_on(ReportedError, command="dashboard"):
        serve(
            place,
            host,
            port,
            tls=Tls(*(file for file in files if file)) if all(files) else None,
            plain=plain_http,
            allow_actions=allow_actions,
            on_start=ready,
        )
