"""`flwr-distill superlink`: Flower's SuperLink, for many nodes and short phases."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import typer

from flwr_distill.cli.errors import fail
from flwr_distill.flower.lines import why_another

STOCK = "flower-superlink"


def superlink(context: typer.Context) -> None:
    """Run Flower's SuperLink, for many nodes: they call it less, and it asks its database less.

    A node's calls reach its own messages and replies only, which Flower does not check. Takes what
    `flower-superlink` takes, on the same database, but for `--fleet-api-type`. With another Flower
    than 1.32 it does not start.
    """
    if reason := why_another():
        stock = f"{STOCK} lets any registered node reply for another whose message's id it knows"
        fail(f"{reason}. {stock}", "superlink")
    from flwr_distill.flower.line_1_32.fleet.linkstate import main, why_unbound  # imports Flower

    _make_folder_of_database(context.args)
    sys.argv = [STOCK, *context.args]
    if reason := why_unbound():
        fail(reason, "superlink")
    main()


def _make_folder_of_database(arguments: list[str]) -> None:
    """Make the folder of the file after ``--database``, for which SQLite's error names no file."""
    for option, value in pairwise(arguments):
        if option == "--database" and not value.startswith(":"):
            try:
                Path(value).parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                fail(f"--database {value}: {error.strerror} (name another file)", "superlink")
