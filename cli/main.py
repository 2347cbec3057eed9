"""The `flwr-distill` command: one file per subcommand, gathered here."""

import typer

app = typer.Typer(
    name="flwr-distill",
    help="Federated learning on data that differ: run nodes, local federations and distillation.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
