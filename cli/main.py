"""The `flwr-distill` command: one file per subcommand, gathered here."""

import typer

from cli.demo import demo
from cli.distill import distill
from cli.down import down
from cli.node import node
from cli.status import status
from cli.up import up

app = typer.Typer(
    name="flwr-distill",
    help="Federated learning on data that differ: run nodes, local federations and distillation.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
)
for command in (demo, distill, node, up, status, down):
    app.command()(command)
