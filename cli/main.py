"""The `flwr-distill` command with all its subcommands."""

import sys
from collections.abc import Callable
from importlib import metadata
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from flwr_distill.cli.certs import certs
from flwr_distill.cli.dashboard import dashboard
from flwr_distill.cli.data import data, partition
from flwr_distill.cli.demo import demo
from flwr_distill.cli.distill import audit, distill
from flwr_distill.cli.doctor import doctor
from flwr_distill.cli.edge import edge
from flwr_distill.cli.errors import FileErrors
from flwr_distill.cli.evaluate import evaluate
from flwr_distill.cli.federation import status, stop, up
from flwr_distill.cli.logs import logs
from flwr_distill.cli.node import node
from flwr_distill.cli.policy import outbox, policy
from flwr_distill.cli.predict import predict
from flwr_distill.cli.queue import queue
from flwr_distill.cli.run import run
from flwr_distill.cli.runs import report, runs
from flwr_distill.cli.settings import settings
from flwr_distill.cli.simulate import simulate
from flwr_distill.cli.stats import stats
from flwr_distill.cli.superlink import register, superlink
from flwr_distill.flower.own_app import APP_DIR

app = typer.Typer(
    name="flwr-distill",
    help="Federated learning on unlike data: run nodes, local federations and distillation.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    cls=FileErrors,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flwr-distill {metadata.version('flwr-distill')}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal may not show every character
            stream.reconfigure(errors="backslashreplace")


def app_folder() -> None:
    """Print the folder of this Flower app, as in flwr run "$(flwr-distill app)".

    Flower reads the settings there, and takes the code from the installed package. Its simulation
    runtime needs Ray: pip install 'flwr-distill[simulation]'.
    """
    typer.echo(APP_DIR)


_TRY, _FEDERATION, _NODE = "Try", "Federations and runs", "Nodes and their owners"
_DATA, _RESULTS = "Data", "Results"
_COMMANDS: dict[str, list[Callable[..., Any]]] = {
    _TRY: [demo, settings],
    _FEDERATION: [up, run, simulate, status, dashboard, logs, stop, register],
    _NODE: [node, edge, doctor, outbox],
    _DATA: [stats, partition, distill, audit],
    _RESULTS: [report, evaluate, predict],
}
for panel, commands in _COMMANDS.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)
app.command("app", rich_help_panel=_TRY)(app_folder)
# Flower's own parser reads the arguments, `--help` included.
app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    rich_help_panel=_FEDERATION,
)(superlink)
app.add_typer(queue, name="queue", rich_help_panel=_FEDERATION)
app.add_typer(certs, name="certs", rich_help_panel=_NODE)
app.add_typer(policy, name="policy", rich_help_panel=_NODE)
app.add_typer(data, name="data", rich_help_panel=_DATA)
app.add_typer(runs, name="runs", rich_help_panel=_RESULTS)
