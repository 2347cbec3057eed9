"""`flwr-distill app`: where Flower's own commands find this app."""

import typer

from flwr_distill.flower.own_app import APP_DIR


def app() -> None:
    """Print the folder of this Flower app, as in flwr run "$(flwr-distill app)".

    Flower takes the settings from there, and the code from what is installed. Its simulation
    runtime needs Ray: pip install 'flwr-distill[simulation]'.
    """
    typer.echo(APP_DIR)
