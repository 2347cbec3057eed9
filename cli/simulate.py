"""`flwr-distill simulate`: a federation of virtual nodes on this machine."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flwr_distill.base.text import counted
from flwr_distill.cli.errors import exit_on, fail
from flwr_distill.cli.options import DataRoot, NodesDevice, run_config_option
from flwr_distill.cli.run import Preset, show_results
from flwr_distill.cli.run_log import RunLog
from flwr_distill.fleet.run_config import RunConfigError
from flwr_distill.fleet.run_settings import read_settings
from flwr_distill.task.errors import ReportedError

DEFAULT_NODES = 10


class _Lines(logging.Handler):
    """Gives the lines of Flower's log to the one that shows them."""

    def __init__(self, log: RunLog) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.show(f"{record.levelname} :      {record.getMessage()}")


@contextmanager
def _logged(log: RunLog) -> Iterator[None]:
    logger = logging.getLogger("flwr")
    handlers, logger.handlers = logger.handlers, [_Lines(log)]
    try:
        yield
    finally:
        logger.handlers = handlers


def simulate(
    run_config: Annotated[
        list[str] | None,
        run_config_option("Settings of the run, as for flwr-distill run. Can be repeated."),
    ] = None,
    preset: Preset = None,
    nodes: Annotated[
        int | None,
        typer.Option(min=1, help="Virtual nodes.", show_default=f"{DEFAULT_NODES}, or by --data"),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder with the data of each node: a folder or file for each. Or, repeated, the "
            "data of one node each."
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Processes that train.", show_default="one a core or GPU"),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="What runs may do on each node: standard, open, hospital, or a YAML file.",
            show_default="none",
        ),
    ] = None,
    device: NodesDevice = "auto",
    data_root: DataRoot = None,
    runs_dir: Annotated[Path, typer.Option(help="Folder for results.")] = Path("runs"),
) -> None:
    """Run this app on virtual nodes: no SuperLink, no Ray, the same results as with real nodes.

    Worker processes stay for the whole run. A run that ended early is resumed by
    -c 'resume="latest"'.

    With --policy each node refuses, keeps back and charges what a real one does, and has an
    outbox in nodes/node-N of the folder for results. There is no sandbox.
    """
    from flwr_distill.node.policy import read_policy  # here: imports YAML
    from flwr_distill.server.settings import RunSettings  # here: imports Flower

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends it like Ctrl-C
    with exit_on(RunConfigError, ReportedError, command="simulate"):
        settings = read_settings(preset, run_config or ())
        if data:
            settings = {"dataset": "private", **settings}
        RunSettings.from_run_config(settings)
        rules = read_policy(policy) if policy else None
    own = _data_of_nodes(data or [])
    if own and nodes not in (None, len(own)):
        problem = f"--data has data of {counted(len(own), 'node')}"
        fail(problem, "simulate", where="nodes", value=nodes, remedy="drop --nodes")

    # Threads of the server that wait in a loop would take cores from the workers.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from flwr_distill.node.compiler import put_off_compiler
    from flwr_distill.node.kernel import keep_freed
    from flwr_distill.simulation.run import on_devices  # here: imports torch
    from flwr_distill.simulation.run import simulate as run
    from flwr_distill.simulation.workers import Config

    put_off_compiler()
    keep_freed()
    count = len(own) or nodes or DEFAULT_NODES
    configs: list[Config] = [
        {
            "num-partitions": count,
            **({"data": str(own[place])} if own else {}),
            **({"data-root": str(data_root)} if data_root else {}),
        }
        for place in range(count)
    ]
    console = Console()
    with RunLog(console) as log, _logged(log):
        try:
            run(
                settings,
                on_devices(configs, str(device)),
                runs_dir.resolve(),
                workers=workers,
                policy=rules,
            )
        except KeyboardInterrupt:
            typer.echo("the simulation has ended", err=True)
            raise typer.Exit(130) from None
        except ReportedError as error:
            fail(error, "simulate")
    if log.folder:
        show_results(console, log.folder)


def _data_of_nodes(data: list[Path]) -> list[Path]:
    """Folder or file of each node: those that were given, or those in the only folder."""
    of_nodes, problem, wrong = data, "", data[0] if data else Path()
    if missing := [path for path in data if not path.exists()]:
        problem, wrong = "does not exist", missing[0]
    elif len(data) == 1 and not wrong.is_dir():
        problem = "is the data of one node"
    elif len(data) == 1:
        of_nodes = sorted(path for path in wrong.iterdir() if path.name[0] != ".")
        problem = "" if of_nodes else "is empty"
    if problem:
        remedy = "give a folder with a folder or file for each node, or one --data for each"
        fail(problem, "simulate", where="data", value=str(wrong), remedy=remedy)
    return of_nodes
