"""`flwr-distill superlink`: Flower's SuperLink, for many nodes and short phases."""

from __future__ import annotations

import os
import sys

import typer

from fleet.line import why_another

STOCK = "flower-superlink"


def superlink(context: typer.Context) -> None:
    """Run Flower's SuperLink, for many nodes: they call it less, and it asks its database less.

    A node's calls reach its own messages and replies only, which Flower does not check. Takes what
    `flower-superlink` takes, on the same database. With another Flower than 1.32 it is
    `flower-superlink`.
    """
    if reason := why_another():
        typer.echo(
            f"flwr-distill superlink: {reason}. This is {STOCK}: any registered node can reply for "
            "another whose message's id it knows (docs/flower.md)",
            err=True,
        )
        os.execvp(STOCK, [STOCK, *context.args])
    from fleet.flower_1_32.linkstate import main  # imports Flower

    sys.argv = [STOCK, *context.args]
    main()
