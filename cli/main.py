"""The `flwr-distill` command: one file per subcommand, gathered here."""

import sys
from importlib import metadata
from io import TextIOWrapper
from typing import Annotated

import typer

from cli.app import app as app_folder
from cli.audit import audit
from cli.certs import certs
from cli.data import data
from cli.demo import demo
from cli.distill import distill
from cli.doctor import doctor
from cli.edge import edge
from cli.errors import FileErrors
from cli.node import node
from cli.outbox import outbox
from cli.partition import partition
from cli.policy import policy
from cli.predict import predict
from cli.register import register
from cli.report import report
from cli.run import run
from cli.runs import runs
from cli.settings import settings
from cli.status import status
from cli.stop import stop
from cli.superlink import superlink
from cli.up import up

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


for command in (
    *(demo, distill, audit, partition, settings, doctor, node, edge, outbox),
    *(up, status, stop, register, run, report, predict),
):
    app.command()(command)
app.command("app")(app_folder)
# Flower's own parser reads the arguments, `--help` included.
app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(superlink)
app.add_typer(certs, name="certs")
app.add_typer(data, name="data")
app.add_typer(policy, name="policy")
app.add_typer(runs, name="runs")
