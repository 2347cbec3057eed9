"""`flwr-distill policy` and `outbox`: what may leave a node, and what has left it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from flwr_distill.cli.errors import exit_on, fail

policy = typer.Typer(help="Check a node's policy, and allow what it leaves to its owner.")


@policy.command()
def check(
    file: Annotated[str, typer.Argument(help="A policy's YAML file, or standard, open, hospital.")],
) -> None:
    """Check a policy, and describe what a node with it does and refuses.

    Exits with 1 and the wrong key or value if the policy is invalid.
    """
    # Here: imports pydantic.
    from flwr_distill.node.policy import described, not_enforced, read_policy
    from flwr_distill.task.errors import SettingsError

    with exit_on(SettingsError, command="policy check"):
        policy = read_policy(file)
        for sentence in [*described(policy), *not_enforced(policy)]:
            typer.echo(sentence)


@policy.command()
def allow(
    run: Annotated[int, typer.Argument(help="Id of the run.", min=1)],
    state_dir: Annotated[
        Path, typer.Option(help="The node's state directory.", exists=True, file_okay=False)
    ] = Path("state/node"),
) -> None:
    """Let a run have this node's samples unchanged, under a policy with `raw-data: ask`.

    The node takes part from the run's next request. A run that resumes it has another id, and needs
    its own permission.
    """
    from flwr_distill.node.raw_data_permissions import allow_raw_data

    with exit_on(OSError, command="policy allow"):
        allow_raw_data(state_dir, run)
    typer.echo(f"Run {run} may have this node's samples unchanged.")


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
    from flwr_distill.fleet.outbox_page import outbox_page, read_log
    from flwr_distill.node.outbox import FOLDER

    if not state_dir.is_dir():
        remedy = "give the node's --state-dir"
        fail("does not exist", "outbox", where="state-dir", value=str(state_dir), remedy=remedy)
    lines, broken = read_log(state_dir / FOLDER)
    if html:
        html.write_text(outbox_page(lines, state_dir / FOLDER, broken), encoding="utf-8")
        typer.echo(f"{html}: {len(lines)} lines")
    else:
        _print_table(lines)
    if broken:
        fail(broken, "outbox")


def _print_table(lines: Sequence[dict[str, Any]]) -> None:
    """Print a log's lines, and the hash of the last."""
    from flwr_distill.fleet.outbox_page import COLUMNS, cells

    table = Table(*(Column(column.lstrip("#"), overflow="fold") for column in COLUMNS))
    for line in lines:
        table.add_row(*map(escape, cells(line)))
    console = Console()
    console.print(table)
    if lines:
        console.print(f"The last line's hash: {lines[-1]['hash']}", soft_wrap=True)
