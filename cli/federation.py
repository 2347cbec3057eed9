"""`flwr-distill up`, `status` and `stop`: a federation of real processes on this machine."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from flwr_distill.base.text import counted, listed
from flwr_distill.cli.connection import SuperLinkOptions, with_superlink
from flwr_distill.cli.dashboard import DEFAULT_PORT
from flwr_distill.cli.errors import exit_on, fail
from flwr_distill.cli.options import (
    DEFAULT_FEDERATION_DIR,
    FederationDir,
    LogFormat,
    NodesDevice,
    read_node_config,
    state_dir_option,
)
from flwr_distill.cli.run_log import Waiting
from flwr_distill.fleet.federation_record import FederationFile
from flwr_distill.fleet.local_federation import LocalFederation, LocalNode, free_ports
from flwr_distill.fleet.servers import why_not_free
from flwr_distill.flower.control import SuperLinkError
from flwr_distill.node.processes import Process, start_bound
from flwr_distill.node.processes import stop as stop_processes
from flwr_distill.node.settings import NodeError, load_settings
from flwr_distill.node.supervisor import status_file
from flwr_distill.server.record.run_ids import LATEST, RunIdError, full_id
from flwr_distill.task.errors import SettingsError

DEFAULT_NODES = 5
OPEN = "The nodes have the policy open: runs may ask for their samples (--config sets another)."
"""Said unless the nodes' policy bounds runs."""
_SET_BY_UP = {"superlink", "insecure", "data", "partition-id", "num-partitions"}
_SET_BY_UP |= {"state-dir", "peer-address"}


def up(
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes",
            min=1,
            help="Number of client nodes.",
            show_default=f"one for each --data, else {DEFAULT_NODES}",
        ),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option("--data", help="Data of one node, as for flwr-distill node; repeat it."),
    ] = None,
    device: NodesDevice = None,
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file with more settings of all nodes.", metavar="FILE"),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=1024,
            max=65533,
            help="Port on loopback where further nodes can sign on; runs are submitted to the "
            "next one, and the one after it is for ServerApps.",
            show_default="free ones",
        ),
    ] = None,
    dashboard: Annotated[
        bool,
        typer.Option("--dashboard", help="Also serve its web page (flwr-distill dashboard)."),
    ] = False,
    log_format: LogFormat = None,
    state_dir: FederationDir = DEFAULT_FEDERATION_DIR,
) -> None:
    """Run a SuperLink and client nodes on this machine, until Ctrl-C or `flwr-distill stop`.

    Node i gets partition i of N for N nodes, or its own data with --data. Nodes that die are
    restarted. If one cannot work here, or the SuperLink is killed, the federation ends with the
    reason. The logs are in the state directory: superlink.log, node-0/node.log and so on;
    `flwr-distill logs RUN` follows them.

    The nodes have the policy open, so runs may ask for their samples; --config can set another.

    Use it on your own machine only. Everything runs as one user, and anything that reaches its
    loopback, such as a run's ServerApp, can start runs.
    """
    if data and nodes not in (None, len(data)):
        problem = f"must be the number of --data, {len(data)}"
        fail(problem, "up", where="nodes", value=nodes, remedy="drop --nodes")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends it like Ctrl-C
    with exit_on(NodeError, SettingsError, command="up"):
        settings = _node_settings(config, data or [], device=device, log_format=log_format)
    number = len(data) if data else nodes or DEFAULT_NODES
    federation = LocalFederation(
        number, state_dir, node_settings=settings, data=data or (), port=port
    )
    all_nodes = counted(number, "node")
    typer.echo(f"starting a SuperLink and {all_nodes}, logs in {federation.state_dir}")
    try:
        start(federation, Console())
        with federation, ExitStack() as stack:
            if dashboard:
                stack.callback(stop_processes, [_start_dashboard(state_dir)])
            where = state_dir_option(state_dir)
            own = " -c 'dataset=\"private\"'" if data else ""
            verb = "is" if number == 1 else "are"
            typer.echo(f"{all_nodes} {verb} online. In another terminal:")
            typer.echo(f"  flwr-distill run{where}{own}")
            if federation.is_open:
                typer.echo(OPEN)
            typer.echo("Ctrl-C ends the federation, and so does:")
            typer.echo(f"  flwr-distill stop{where}")
            while True:
                time.sleep(1.0)
                for node in federation.restart_dead_nodes():
                    typer.echo(f"{node.name} died: restarted")
    except KeyboardInterrupt:
        typer.echo("the federation has ended")
    except RuntimeError as error:
        fail(error, "up")


def _start_dashboard(state_dir: Path) -> Process:
    """Start the dashboard at its usual port, or at a free one."""
    port = DEFAULT_PORT if not why_not_free(f"127.0.0.1:{DEFAULT_PORT}") else free_ports(1)[0]
    command = [sys.executable, "-P", "-m", "flwr_distill.command", "dashboard", "--open"]
    return start_bound([*command, "--port", str(port), "--state-dir", str(state_dir)])


def start(federation: LocalFederation, console: Console) -> None:
    """Start a federation; a terminal shows which nodes are not yet online."""
    total = len(federation.nodes)
    with Waiting(console, "starting the SuperLink ...") as waiting:

        def show(awaited: Sequence[LocalNode]) -> None:
            names = ", ".join(node.name for node in awaited[:3])
            more = f" and {len(awaited) - 3} others" if len(awaited) > 3 else ""
            what = f"{total - len(awaited)} of {counted(total, 'node')} online"
            waiting.show(f"{what}, waiting for {names}{more} ..." if awaited else f"{what} ...")

        federation.start(on_wait=show)


def _node_settings(config: Path | None, data: list[Path], **options: str | None) -> dict[str, Any]:
    """Settings of all nodes, checked before they start, so that a mistake is reported once."""
    checked = load_settings(config, {})
    for path in data:
        load_settings(None, {"data": path})
    settings = read_node_config(config)
    for key in _SET_BY_UP & settings.keys():
        raise SettingsError("up sets it", where=key, remedy="remove it", source=f"config={config}")
    load_settings(None, options)
    return settings | {
        name.replace("_", "-"): value or getattr(checked, name) for name, value in options.items()
    }


def status(state_dir: FederationDir = DEFAULT_FEDERATION_DIR) -> None:
    """Show the processes of a local federation; exit with 1 if none runs."""
    record = FederationFile(state_dir).read()
    if record is None:
        typer.echo(f"no federation runs in {state_dir}", err=True)
        raise typer.Exit(1)
    typer.echo(
        f"SuperLink: Control API at {record.control_address}, FLWR_HOME={record.flower_home}"
    )
    columns = ("device", "pid", "supernode", "executor", "worker")
    table = Table("node", "state", "device", "pid", "SuperNode", "executor", "worker")
    for directory in map(Path, record.node_dirs):
        parts = _node_status(directory)
        state = "online" if "online" in parts else "starting" if parts else "down"
        if "ready" in parts:
            state += ", warm" if "worker" in parts else ", resting"
        state += f", {parts['moves']}" if "moves" in parts else ""
        table.add_row(directory.name, state, *(str(parts.get(name, "-")) for name in columns))
    Console().print(table)


def _node_status(state_dir: Path) -> dict[str, Any]:
    """A node's status file; empty if the node does not run."""
    try:
        parts: dict[str, Any] = json.loads(status_file(state_dir).read_text(encoding="utf-8"))
        os.kill(parts["pid"], 0)
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return parts


@with_superlink
def stop(
    *,
    run: Annotated[
        str,
        typer.Argument(
            help="Id of a run or its first digits, or latest.", show_default="the federation"
        ),
    ] = "",
    options: SuperLinkOptions,
) -> None:
    """End the federation that `flwr-distill up` started; with RUN, only that run.

    The options for a SuperLink are those of `flwr-distill run`; they are for stopping a run.
    """
    if not run:
        _end_federation(options.state_dir)
        return
    link = options.find("stop")

    with exit_on(SuperLinkError, command="stop"), link.open(timeout=10.0) as control:
        running = [str(run.run_id) for run in control.runs() if not run.status.finished]
        if run == LATEST and not running:
            fail("no run is running", "stop")
        try:
            run_id = full_id(run, running)
        except RunIdError as error:
            fail(f"{error}; running: {listed(running) if running else 'none'}", "stop")
        control.stop_run(int(run_id))
    typer.echo(f"run {run_id} is stopped")


def _end_federation(state_dir: Path) -> None:
    file = FederationFile(state_dir)
    record = file.read()
    if record is None:
        typer.echo(f"no federation runs in {state_dir}")
        return
    with suppress(ProcessLookupError):
        os.kill(record.pid, signal.SIGTERM)
    deadline = time.monotonic() + 30
    while file.read() is not None:
        if time.monotonic() > deadline:
            remedy = f"kill it with `kill -9 {record.pid}`, its children end with it"
            fail(f"process {record.pid} does not end: {remedy}", "stop")
        time.sleep(0.1)
    typer.echo("the federation has ended")
