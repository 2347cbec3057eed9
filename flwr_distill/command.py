"""The `flwr-distill` command."""

import os
import sys

from flwr_distill.own_modules import own_first


def main() -> None:
    """Run the command with our own packages, whatever else is on Python's path."""
    sys.path[:] = own_first(sys.path)
    from cli.main import app  # here, and below: found by that path
    from node.environment import process_environment

    os.environ.update(process_environment(os.environ))
    app()
