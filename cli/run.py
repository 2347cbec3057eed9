"""`flwr-distill run`: submit a run to a SuperLink with TLS, and follow it to its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cli.errors import exit_on, fail
from cli.options import ControlAddress, Timeout
from cli.results import results_table
from fleet.submission import RunError, submit
from node.settings import flat_toml

APP_DIR = Path(__file__).resolve().parent.parent
CONNECTION = "flwr-distill-run"


def run(
    run_config: Annotated[
        str, typer.Option("--run-config", "-c", help="As for flwr run.", show_default="none")
    ] = "",
    superlink: ControlAddress = "127.0.0.1:9093",
    root_certificates: Annotated[
        Path,
        typer.Option(help="PEM file of the SuperLink's authority.", exists=True),
    ] = Path("certs/ca.crt"),
    runs_dir: Annotated[Path, typer.Option(help="Folder of the ServerApp's results.")] = Path(
        "runs"
    ),
    timeout: Timeout = 60.0,
) -> None:
    """Submit a run of this app, print its log and its results; exit with 1 if it fails.

    Like `flwr run . --stream`, but it waits for the SuperLink, survives the SuperLink's restarts,
    and its exit status is the run's.
    """
    from fleet.registration import RegistrationError, SecureControl  # imports Flower

    def control() -> SecureControl:
        link = SecureControl(superlink, root_certificates)
        link.wait(timeout)
        return link

    with tempfile.TemporaryDirectory() as home:
        config = {"address": superlink, "root-certificates": str(root_certificates.resolve())}
        (Path(home) / "config.toml").write_text(
            f"[superlink.{CONNECTION}]\n{flat_toml(config)}", encoding="utf-8"
        )
        commands = str(Path(sys.executable).parent)
        path = os.pathsep.join([commands, os.environ.get("PATH", os.defpath)])
        env = {**os.environ, "PATH": path, "FLWR_HOME": home}
        with exit_on(RunError, RegistrationError, command="run"):
            with control():
                typer.echo(f"submitting to {superlink}")
            outcome = submit(
                APP_DIR,
                CONNECTION,
                run_config,
                env=env,
                control=control,
                on_line=typer.echo,
                timeout=threading.TIMEOUT_MAX,
            )
            status = outcome.status
            while not status.startswith("finished"):
                typer.echo("the SuperLink was away; the run's log from the start:")
                subprocess.run(
                    ["flwr", "log", str(outcome.run_id), CONNECTION, "--stream"], env=env
                )
                with control() as link:
                    status = link.run_status(outcome.run_id)
    if status != "finished:completed":
        fail(f"run {outcome.run_id} ended as {status}", "run")
    summary = runs_dir / str(outcome.run_id) / "summary.json"
    if summary.exists():
        result = json.loads(summary.read_text())
        Console().print(results_table(f"Run {outcome.run_id}", {result["strategy"]: result}))
        typer.echo(f"Results in {summary.parent}")
