"""`flwr-distill edge`: one node of the federation above, with a federation of its own below."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from flwr_distill.cli.errors import exit_on, fail
from flwr_distill.cli.options import (
    NodeConfigFile,
    read_node_config,
    run_config_option,
    with_node_options,
)
from flwr_distill.fleet.run_config import RunConfigError, read_run_config
from flwr_distill.flower.lines import why_unserved
from flwr_distill.flower.own_app import APP_DIR
from flwr_distill.node.settings import NodeError, load_settings
from flwr_distill.node.stock import FLEET_OVER_HTTP, installed_line
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.settings import RunConfigValue

DEFAULT_CERTIFICATES = Path("certs/server")
DEFAULT_STATE_DIR = Path("state/edge")
ONE_PORT = (
    "With this Flower nodes and users have one port: anyone who reaches it can start runs below "
    "(docs/flower.md, Behind a proxy)."
)


@with_node_options(
    *("name", "superlink", "insecure", "root_certificates", "auth_key", "state_dir", "policy"),
    *("poll_busy", "poll_idle", "connect_timeout", "log_level", "log_format"),
)
def edge(
    settings: dict[str, Any],
    config: NodeConfigFile = None,
    below_address: Annotated[
        str,
        typer.Option(
            help="host:port where the edge's nodes connect. The next port, on loopback, is its "
            "Control API; the port after it is for ServerApps. From Flower 1.40 on all have one.",
        ),
    ] = "0.0.0.0:9094",
    below_certificates: Annotated[
        Path,
        typer.Option(
            help="Folder with ca.crt, server.crt and server.key for the edge's nodes "
            "(flwr-distill certs server, with --host localhost); only registered nodes may join.",
        ),
    ] = DEFAULT_CERTIFICATES,
    below_insecure: Annotated[
        bool, typer.Option("--below-insecure", help="No TLS below, and any node may join.")
    ] = False,
    strategy: Annotated[
        str, typer.Option(help="Strategy below: fedavg, fedhead (one sector), or another.")
    ] = "fedavg",
    min_nodes: Annotated[
        int, typer.Option(min=1, help="Nodes below that a round needs to begin.")
    ] = 2,
    run_config: Annotated[
        list[str] | None,
        run_config_option(
            "More settings of the runs below (flwr-distill settings). Can be repeated."
        ),
    ] = None,
) -> None:
    """Run an edge: one node to the federation above, a SuperLink to its own nodes.

    A round above is a round below. The edge's nodes train by the edge's strategy, and the edge
    sends the resulting model with their number of samples. The task (data set, model, training) and
    the rounds come from above; everything else is the edge's. Runs above must only average models
    (fedavg, fedprox, krum ...). Results of runs below are in below/runs in the state directory.
    After Ctrl-C, runs below still write their results.

    Nodes join it as any SuperLink: flwr-distill node --superlink EDGE:9094.
    """
    if reason := why_unserved():
        fail(reason, "edge")
    with exit_on(NodeError, RunConfigError, SettingsError, command="edge"):
        node = {"state-dir": str(DEFAULT_STATE_DIR), **read_node_config(config)}
        for name, value in settings.items():
            if value is not None:
                node[name.replace("_", "-")] = str(value) if isinstance(value, Path) else value
        options = {key.replace("-", "_"): value for key, value in node.items()}
        checked = load_settings(None, {**options, "edge": "."})  # as the node will read it
        own = {"strategy": strategy, "min-nodes": min_nodes, **_overrides(run_config or [])}

    from flwr_distill.fleet.edge import Below, Edge, EdgeStartError  # here: imports Flower
    from flwr_distill.fleet.federation_record import FederationRunsError
    from flwr_distill.fleet.servers import ServerCertificate
    from flwr_distill.flower.control import SuperLinkError

    certificate = None
    if not below_insecure:
        files = [below_certificates / name for name in ("ca.crt", "server.crt", "server.key")]
        if missing := [str(file) for file in files if not file.exists()]:
            remedy = "flwr-distill certs init and certs server make it, or give --below-insecure"
            problem = f"{missing[0]} does not exist"
            fail(problem, "edge", where="below-certificates", remedy=remedy)
        certificate = ServerCertificate(*files)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends it like Ctrl-C
    below = Below(below_address, certificate, own)
    typer.echo(f"nodes connect at {below_address}, logs in {checked.state_dir}")
    if installed_line() >= FLEET_OVER_HTTP:
        typer.echo(ONE_PORT, err=True)
    errors = (EdgeStartError, FederationRunsError, SuperLinkError, ValueError)
    with exit_on(*errors, command="edge"):
        try:
            Edge(node, checked.state_dir, below, APP_DIR).run()
        except KeyboardInterrupt:
            typer.echo("the edge has ended")


def _overrides(texts: list[str]) -> dict[str, RunConfigValue]:
    """Settings of the runs below, checked as far as possible without a run above."""
    from flwr_distill.fleet.edge_runs import FIXED  # here: imports Flower
    from flwr_distill.server.settings import RunSettings

    own: dict[str, RunConfigValue] = {}
    for text in texts:
        own |= read_run_config(text)
    if taken := sorted(own.keys() & set(FIXED)):
        problem = "follows from the run above"
        raise SettingsError(problem, where=taken[0], remedy="remove it", source="run-config")
    RunSettings.from_run_config(own)
    return own
