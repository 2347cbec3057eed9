"""`flwr-distill queue`: list runs in the queue, cancel them, wait for them, and serve them."""

from __future__ import annotations

import random
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from flwr_distill.cli.connection import SuperLinkOptions, lasting, with_superlink
from flwr_distill.cli.errors import exit_on, fail
from flwr_distill.cli.options import DEFAULT_FEDERATION_DIR, FederationDir, state_dir_option
from flwr_distill.cli.run_folders import shortest
from flwr_distill.fleet.queue.door import call, listed_runs
from flwr_distill.fleet.queue.entry import QueuedRun, QueueError, State
from flwr_distill.fleet.queue.file import MAX_ENDED, SHOWN
from flwr_distill.flower.lines import folder_for

queue = typer.Typer(
    help="List the queue of runs; cancel runs, wait for one, serve the queue.",
    invoke_without_command=True,
)
_ANSWERS_WITHIN = 10.0
"""Seconds for which the service waits for a SuperLink before it says that there is none."""
_PATIENCE = 60
"""Polls in a row, each second, for which a service that did answer may be away."""
Number = Annotated[int, typer.Argument(metavar="ID", min=1, help="The run's id in the queue.")]


@queue.callback()
def list_queue(
    context: typer.Context,
    ended: Annotated[int, typer.Option(min=0, max=MAX_ENDED, help="Ended runs to list.")] = SHOWN,
    state_dir: FederationDir = DEFAULT_FEDERATION_DIR,
) -> None:
    """List the queue of runs: what runs, what waits for what, and how the last ones ended.

    Runs have the first digits of their ids, which commands such as `flwr-distill logs` take.
    `flwr-distill run --queue` puts a run there. With a command: cancel a run, wait for one, or
    serve the queue.
    """
    if context.invoked_subcommand is not None:
        return
    with exit_on(QueueError, command="queue"):
        runs = listed_runs(state_dir, ended=ended)
    table = Table(
        *(Column(name, no_wrap=True) for name in ("id", "place", "user", "state", "since", "run")),
        *(Column("priority", justify="right"), Column("why", overflow="fold")),
        box=None,
        padding=(0, 1, 0, 0),
    )
    ids = [run.run_id for run in runs if run.run_id != "0"]
    for run in runs:
        place = str(run.position or "")
        since = datetime.fromtimestamp(run.since, UTC).astimezone().strftime("%m-%d %H:%M:%S")
        run_id = shortest(run.run_id, ids) if run.run_id != "0" else ""
        row = (str(run.id), place, run.user, run.state, since, run_id, str(run.priority), run.why)
        table.add_row(*map(escape, row))
    if runs:
        Console().print(table)
    else:
        typer.echo("no runs in the queue")


@queue.command()
def cancel(number: Number, state_dir: FederationDir = DEFAULT_FEDERATION_DIR) -> None:
    """Cancel a run of yours: one that waits never starts, one that runs is stopped.

    Runs that were to follow it (--after) are skipped. Root and the queue's own user may cancel
    anyone's.
    """
    with exit_on(QueueError, command="queue cancel"):
        state = call(state_dir, call="cancel", id=number)
    ends = "cancelled" if state == State.CANCELLED else "being stopped"
    typer.echo(f"run {number} in the queue is {ends}")


@queue.command()
def wait(number: Number, state_dir: FederationDir = DEFAULT_FEDERATION_DIR) -> None:
    """Wait for the end of a run, and show what happens to it; exit with 1 unless it completes."""
    shown, patience = "", 0
    while True:
        try:
            run = _one(number, state_dir)
        except QueueError as error:  # the service may be starting again
            if not patience:
                fail(error, "queue wait")
            patience -= 1
        else:
            patience = _PATIENCE
            text = f"{run.state} {run.why}".strip()
            if run.state is State.RUNNING:
                logs = f"flwr-distill logs {run.run_id}{state_dir_option(state_dir)}"
                text += f": `{logs}` follows it"
            if text != shown:
                typer.echo(f"run {number} in the queue: {text}")
                shown = text
            if run.state.ended:
                raise typer.Exit(run.state is not State.COMPLETED)
        time.sleep(random.uniform(0.7, 1.3))


@queue.command()
@with_superlink
def serve(
    *,
    at_once: Annotated[int, typer.Option(min=1, max=100, help="Runs that run at a time.")] = 1,
    options: SuperLinkOptions,
) -> None:
    """Serve the queue: start its runs in their order, and stop those that exceed their timeout.

    Its file and socket are in the state directory. Who may enter that and is in its group may
    submit runs. Nothing is lost and nothing starts twice if this process or the SuperLink is
    killed: start it again. Ctrl-C leaves runs as they are.
    """
    from flwr_distill.fleet.queue.service import serve as serve_queue

    if not folder_for("fleet"):
        fail("the queue needs flwr==1.32.1: another shows no settings of runs", "queue serve")
    link = options.find("queue serve")

    def ready() -> None:
        command = f"flwr-distill run --queue{state_dir_option(options.state_dir)}"
        typer.echo(f"the queue is served: {command}")

    with exit_on(QueueError, command="queue serve"):
        control = lasting(link, options.state_dir, _ANSWERS_WITHIN)
        serve_queue(options.state_dir, control, at_once, ready)


def _one(number: int, state_dir: Path) -> QueuedRun:
    for ended in (SHOWN, MAX_ENDED):  # the long list is needed for old runs alone
        for run in listed_runs(state_dir, ended=ended):
            if run.id == number:
                return run
    remedy = "`flwr-distill queue` lists them"
    raise QueueError("is not in the queue", where=f"run {number}", remedy=remedy)
