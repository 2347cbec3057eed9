"""`flwr-distill up`: a local federation of real processes."""

from __future__ import annotations

import signal
import time
from typing import Annotated

import typer

from cli.errors import fail
from cli.options import DEFAULT_FEDERATION_DIR, FederationDir, NodesDevice
from fleet.local_federation import LocalFederation


def up(
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Number of client nodes.")] = 4,
    device: NodesDevice = "auto",
    state_dir: FederationDir = DEFAULT_FEDERATION_DIR,
) -> None:
    """Run a SuperLink and client nodes on this machine, until Ctrl-C.

    Node i gets partition i of N for N nodes. Nodes that die are restarted; if one cannot work here,
    the federation ends and says why. The logs are in the state directory: superlink.log,
    node-0/node.log and so on.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends it like Ctrl-C
    federation = LocalFederation(nodes, state_dir, node_settings={"device": device})
    typer.echo(f"starting a SuperLink and {nodes} nodes, logs in {federation.state_dir} ...")
    try:
        with federation:
            home = federation.env["FLWR_HOME"]
            typer.echo(f"{nodes} nodes are online. In another terminal:")
            typer.echo(f"  FLWR_HOME={home} flwr run . {federation.connection} --stream")
            typer.echo("Ctrl-C ends the federation.")
            while True:
                time.sleep(1.0)
                for index in federation.restart_dead_nodes():
                    typer.echo(f"node {index} had died: started again")
    except KeyboardInterrupt:
        typer.echo("the federation has ended")
    except RuntimeError as error:
        fail(error, "up")
