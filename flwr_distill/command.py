"""The `flwr-distill` command."""

import os
import sys
from pathlib import Path


def main() -> None:
    """Run the command with our own packages, whatever else is on Python's path."""
    given = list(sys.path)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from node.environment import process_environment  # here, and below: found by that path
    from node.own_modules import own_first

    sys.path[:] = own_first(given)
    os.environ.update(process_environment(os.environ))
    from cli.main import app

    app()
