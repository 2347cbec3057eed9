"""`flwr-distill outbox`: what has left a node."""

from pathlib import Path
from typing import Annotated

import typer

from flwr_distill.cli.errors import fail


def outbox(
    state_dir: Annotated[
        Path, typer.Option("--state-dir", help="The node's state directory.")
    ] = Path("state/node"),
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page instead of a table.")
    ] = None,
) -> None:
    """Show everything that has left a node: when, for which run, what, how much, and to whom.

    A hash chains each line of the log to the line before. Note the last hash, which is shown: a log
    that was cut off or rewritten has another one.

    If the chain is broken, shows the lines before the break and exits with 1.
    """
    from flwr_distill.cli.outbox_page import outbox_page, print_table
    from flwr_distill.node.outbox import FOLDER, OutboxError, entries

    if not state_dir.is_dir():
        fail(f"state-dir={state_dir} does not exist (give the node's --state-dir)", "outbox")
    lines, broken = [], ""
    try:
        for entry in entries(state_dir / FOLDER):
            lines.append(entry)
    except OutboxError as error:
        broken = str(error)
    if html:
        html.write_text(outbox_page(lines, state_dir / FOLDER, broken), encoding="utf-8")
        typer.echo(f"{html}: {len(lines)} lines")
    else:
        print_table(lines)
    if broken:
        fail(broken, "outbox")
