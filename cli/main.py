"""The `flwr-distill` command: one file per subcommand, gathered here."""

import sys
from collections.abc import Callable
from importlib import metadata
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from flwr_distill.cli.app import app as app_folder
from flwr_distill.cli.audit import audit
from flwr_distill.cli.certs import certs
from flwr_distill.cli.data import data
from flwr_distill.cli.demo import demo
from flwr_distill.cli.distill import distill
from flwr_distill.cli.doctor import doctor
from flwr_distill.cli.edge import edge
from flwr_distill.cli.errors import FileErrors
from flwr_distill.cli.node import node
from flwr_distill.cli.outbox import outbox
from flwr_distill.cli.partition import partition
from flwr_distill.cli.policy import policy
from flwr_distill.cli.predict import predict
from flwr_distill.cli.register import register
from flwr_distill.cli.report import report
from flwr_distill.cli.run import run
from flwr_distill.cli.runs import runs
from flwr_distill.cli.settings import settings
from flwr_distill.cli.simulate import simulate
from flwr_distill.cli.status import status
from flwr_distill.cli.stop import stop
from flwr_distill.cli.superlink import superlink
from flwr_distill.cli.up import up

app = typer.Typer(
    name="flwr-distill",
    help="Federated learning on data that differ: run nodes, local federations and distillation.",
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
        if isinstance(stream, TextIOWrapper):  # names and signs that a terminal cannot show
            stream.reconfigure(errors="backslashreplace")


_TRY, _FEDERATION, _NODE = "Try", "Federations and runs", "Nodes and their owners"
_DATA, _RESULTS = "Data", "Results"
_COMMANDS: dict[str, list[Callable[..., Any]]] = {
    _TRY: [demo, settings],
    _FEDERATION: [up, run, simulate, status, stop, register],
    _NODE: [node, edge, doctor, outbox],
    _DATA: [partition, distill, audit],
    _RESULTS: [report, predict],
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
app.add_typer(certs, name="certs", rich_help_panel=_NODE)
app.add_typer(policy, name="policy", rich_help_panel=_NODE)
app.add_typer(data, name="data", rich_help_panel=_DATA)
app.add_typer(runs, name="runs", rich_help_panel=_RESULTS)
