"""`flwr-distill run`: submit a run, follow it to its end, and show its results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flwr_distill.cli.connection import Connection, SuperLinkOptions, with_superlink
from flwr_distill.cli.errors import exit_on, fail
from flwr_distill.cli.options import run_config_option, state_dir_option
from flwr_distill.cli.run_log import RunLog, results_table
from flwr_distill.fleet.federation_record import FederationFile, FederationRecord
from flwr_distill.fleet.queue.door import call
from flwr_distill.fleet.queue.entry import MAX_PRIORITY, QueueError
from flwr_distill.fleet.run_config import RunConfigError
from flwr_distill.fleet.run_settings import checked, fitted, read_settings
from flwr_distill.fleet.submission import RunError, RunOutcome, submit
from flwr_distill.flower.control import SuperLinkError
from flwr_distill.flower.own_app import APP_DIR
from flwr_distill.server.record.writing import ResultsError
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.settings import RunConfigValue

Preset = Annotated[
    str | None,
    typer.Option(help="Settings of a paper, by name, as in hfldd-mnist.", metavar="NAME"),
]


@with_superlink
def run(
    *,
    run_config: Annotated[
        list[str] | None,
        run_config_option(
            "Settings of the run (flwr-distill settings), as in 'num-rounds=5 "
            'strategy="fedavg"\'; or a TOML file. Can be repeated: the last one counts.'
        ),
    ] = None,
    preset: Preset = None,
    options: SuperLinkOptions,
    runs_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the ServerApp's results, as seen from here.",
            show_default="the folder that it reports",
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            min=0,
            help="Seconds to wait for the SuperLink; with --queue, seconds after which the started "
            "run is stopped.",
            show_default="60; with --queue a day",
        ),
    ] = None,
    queued: Annotated[
        bool,
        typer.Option("--queue", help="Put the run in the queue (flwr-distill queue), and return."),
    ] = False,
    priority: Annotated[
        int | None,
        typer.Option(
            min=-MAX_PRIORITY,
            max=MAX_PRIORITY,
            help="With --queue: runs of higher priority start first.",
            show_default="0",
        ),
    ] = None,
    after: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="ID",
            help="With --queue: start once that run in the queue is completed; skipped if it is "
            "not.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run this app: show its progress and its results; exit with 1 if it fails.

    Without options it runs on the federation of `flwr-distill up`, with all its nodes; otherwise on
    the named SuperLink. After Ctrl-C the run continues. With --queue it returns at once.
    """
    with exit_on(RunConfigError, SettingsError, command="run"):
        overrides = read_settings(preset, run_config or ())
        checked(overrides)
    if queued:
        if options.name_one:
            fail("the queue has its own SuperLink: drop the options that name one", "run")
        order = {"priority": priority, "after": after, "timeout": timeout}
        _enqueue(
            overrides, options.state_dir, {key: v for key, v in order.items() if v is not None}
        )
        return
    if priority is not None or after is not None:
        fail("priority and after are for the queue: add --queue", "run")
    link = options.find("run")
    folder = run_to_its_end(link, overrides, 60.0 if timeout is None else timeout, "run")
    if folder:
        show_results(Console(), folder if runs_dir is None else runs_dir / folder.name)


def run_to_its_end(
    link: Connection, overrides: dict[str, RunConfigValue], timeout: float, command: str
) -> Path | None:
    """Submit a run and show its log; give the server's folder of its results, if the log names it.

    The command ends with 1 if the run fails, or cannot be started on this federation.
    """
    if link.federation:
        overrides = _fitted(overrides, link.federation, command)
    with RunLog(Console()) as log:
        outcome = _follow(link, overrides, log, timeout, command)
    if not outcome.completed:
        if outcome.status == "finished:stopped":
            fail(f"run {outcome.run_id} was stopped", command)
        reason = log.reason(outcome.details) or "the log above says why"
        fail(f"run {outcome.run_id} failed: {reason}", command)
    return log.folder


def _enqueue(
    overrides: dict[str, RunConfigValue], state_dir: Path, order: Mapping[str, float]
) -> None:
    """Put a run in the queue of a state directory."""
    from flwr_distill.flower.bundle import app_bundle  # here: imports Flower

    if record := FederationFile(state_dir).read():
        overrides = _fitted(overrides, record, "run")
    with exit_on(QueueError, ValueError, command="run"):
        bundle = app_bundle(APP_DIR, overrides)
        number = call(state_dir, bundle, call="add", order={"run_config": overrides, **order})
    wait = f"flwr-distill queue wait {number}{state_dir_option(state_dir)}"
    typer.echo(f"run {number} is in the queue; `{wait}` waits for it")


def _fitted(
    overrides: dict[str, RunConfigValue], federation: FederationRecord, command: str
) -> dict[str, RunConfigValue]:
    with exit_on(SettingsError, ResultsError, command=command):
        return fitted(overrides, federation)


def _follow(
    link: Connection,
    overrides: dict[str, RunConfigValue],
    log: RunLog,
    timeout: float,
    command: str,
) -> RunOutcome:
    """Submit the run and follow it; Ctrl-C ends only the command."""
    run_id = ""

    def show(line: str) -> None:
        nonlocal run_id
        run_id = run_id or line.rpartition(" ")[2]
        log.show(line)

    try:
        with exit_on(RunError, SuperLinkError, command=command):
            return submit(APP_DIR, overrides, control=lambda: link.open(timeout), on_line=show)
    except KeyboardInterrupt:
        if run_id:
            stop = f"flwr-distill stop {run_id}{link.given}"
            typer.echo(f"run {run_id} continues; `{stop}` stops it", err=True)
        raise typer.Exit(130) from None


def are_here(results: Path, on_server: Path) -> bool:
    """Whether a run's file of results is here; else prints in which folder they are."""
    if not results.exists():
        typer.echo(f"The results are with the server, in {on_server} (here: --runs-dir)")
    return results.exists()


def show_results(console: Console, folder: Path) -> None:
    """Print the results in a run's folder, or where they are."""
    summary = folder / "summary.json"
    if not are_here(summary, folder):
        return
    result = json.loads(summary.read_text(encoding="utf-8"))
    console.print(results_table(f"Run {folder.name}", {result["strategy"]: result}))
    typer.echo(f"Results in {folder}")
