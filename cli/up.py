"""`flwr-distill up`: a local federation of real processes."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from flwr_distill.base.text import counted
from flwr_distill.cli.errors import exit_on, fail
from flwr_distill.cli.options import DEFAULT_FEDERATION_DIR, FederationDir, NodesDevice
from flwr_distill.cli.waiting import Waiting
from flwr_distill.fleet.local_federation import LocalFederation, LocalNode
from flwr_distill.node.settings import NodeError, load_settings
from flwr_distill.task.text_files import read_text

DEFAULT_NODES = 5
OPEN = "The nodes have the policy open: runs may ask for their samples (--config sets another)."
_OWN = ("superlink", "insecure", "partition-id", "num-partitions", "state-dir", "peer-address")


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
    state_dir: FederationDir = DEFAULT_FEDERATION_DIR,
) -> None:
    """Run a SuperLink and client nodes on this machine, until Ctrl-C or `flwr-distill stop`.

    Node i gets partition i of N for N nodes, or with --data its own data. Nodes that die are
    restarted; if one cannot work here, the federation ends and says why. The logs are in the state
    directory: superlink.log, node-0/node.log and so on.

    The nodes have the policy open, so runs may ask for their samples; --config can set another.

    For a machine of your own: all runs as one user, and who can reach its loopback, such as a run's
    ServerApp, can start runs.
    """
    if data and nodes not in (None, len(data)):
        there = "is" if len(data) == 1 else "are"
        fail(f"nodes={nodes}, but there {there} {len(data)} --data: drop --nodes", "up")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends it like Ctrl-C
    with exit_on(NodeError, command="up"):
        settings = _node_settings(config, device, data or [])
    number = len(data) if data else nodes or DEFAULT_NODES
    federation = LocalFederation(
        number, state_dir, node_settings=settings, data=data or (), port=port
    )
    typer.echo(
        f"starting a SuperLink and {counted(number, 'node')}, logs in {federation.state_dir}"
    )
    try:
        start(federation, Console())
        with federation:
            again = "" if state_dir == DEFAULT_FEDERATION_DIR else f" --state-dir {state_dir}"
            own = " -c 'dataset=\"private\"'" if data else ""
            verb = "is" if number == 1 else "are"
            typer.echo(f"{counted(number, 'node')} {verb} online. In another terminal:")
            typer.echo(f"  flwr-distill run{again}{own}")
            if federation.is_open:
                typer.echo(OPEN)
            typer.echo("Ctrl-C ends the federation, and so does:")
            typer.echo(f"  flwr-distill stop{again}")
            while True:
                time.sleep(1.0)
                for node in federation.restart_dead_nodes():
                    typer.echo(f"{node.name} had died: started again")
    except KeyboardInterrupt:
        typer.echo("the federation has ended")
    except RuntimeError as error:
        fail(error, "up")


def start(federation: LocalFederation, console: Console) -> None:
    """Start a federation; a terminal shows which nodes are not yet online."""
    total = len(federation.nodes)
    with Waiting(console, "starting the SuperLink ...") as waiting:

        def show(awaited: Sequence[LocalNode]) -> None:
            names = ", ".join(node.name for node in awaited[:3])
            more = f" and {len(awaited) - 3} others" if len(awaited) > 3 else ""
            what = f"{total - len(awaited)} of {counted(total, 'node')} online"
            waiting.what = f"{what}, waiting for {names}{more} ..." if awaited else f"{what} ..."

        federation.start(on_wait=show)


def _node_settings(config: Path | None, device: str | None, data: list[Path]) -> dict[str, Any]:
    """Settings of all nodes, checked here, so that a mistake is said once and at once."""
    checked = load_settings(config, {})
    for path in data:
        load_settings(None, {"data": path})
    content: dict[str, Any] = yaml.safe_load(read_text(config)) if config else {}
    settings = {str(key).replace("_", "-"): value for key, value in content.items()}
    if taken := [key for key in _OWN if key in settings] + ["data"] * ("data" in settings):
        raise NodeError(f"config={config}: {taken[0]} is set by up itself: remove it")
    load_settings(None, {"device": device})
    return settings | {"device": device or checked.device}
