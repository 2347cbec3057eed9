"""`flwr-distill edge`: take part above as one node, with a federation of one's own below."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from flwr_distill.cli.errors import exit_on, fail
from flwr_distill.cli.options import (
    AuthKey,
    ConnectTimeout,
    FleetAddress,
    Insecure,
    LogLevel,
    NodeConfigFile,
    PollBusy,
    PollIdle,
    RootCertificates,
    StateDir,
    node_option,
    run_config_option,
)
from flwr_distill.fleet.run_config import RunConfigError, read_run_config
from flwr_distill.flower.lines import why_another
from flwr_distill.flower.own_app import APP_DIR
from flwr_distill.node.settings import NodeError, load_settings
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.settings import (
    RunConfigValue,
)

DEFAULT_CERTIFICATES = Path("certs/server")
DEFAULT_STATE_DIR = Path("state/edge")
_BELOW = ("config", "below_address", "below_certificates", "below_insecure", "strategy")


def edge(
    context: typer.Context,
    config: NodeConfigFile = None,
    name: Annotated[
        str | None, node_option("name", "What the run above calls this edge, as in region-3.")
    ] = None,
    superlink: FleetAddress = None,
    insecure: Insecure = None,
    root_certificates: RootCertificates = None,
    auth_key: AuthKey = None,
    state_dir: StateDir = None,
    policy: Annotated[
        str | None,
        node_option("policy", "What runs above may ask: a preset, or a YAML file.", "standard"),
    ] = None,
    below_address: Annotated[
        str,
        typer.Option(
            help="host:port where nodes of one's own sign on; runs below are listed at the next "
            "port, on loopback, and the one after it is for ServerApps.",
        ),
    ] = "0.0.0.0:9094",
    below_certificates: Annotated[
        Path,
        typer.Option(
            help="Folder with ca.crt, server.crt and server.key for one's own nodes "
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
    poll_busy: PollBusy = None,
    poll_idle: PollIdle = None,
    connect_timeout: ConnectTimeout = None,
    log_level: LogLevel = None,
) -> None:
    """Run an edge: one node to the federation above, a SuperLink to nodes of its own.

    A round above is a round below: the edge has its nodes train, by a strategy of its own, and
    sends the model that they make together, with their samples. The task (data set, model,
    training) and the rounds come from above; strategy, nodes and all else are the edge's. Runs
    above must only average models (fedavg, fedprox, krum ...). Results of what it sums up are in
    below/runs in the state directory. It ends with Ctrl-C, and lets runs below write theirs.

    Nodes join it as any SuperLink: flwr-distill node --superlink EDGE:9094.
    """
    if reason := why_another():
        fail(reason, "edge")
    options = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in context.params.items()
        if value is not None and key not in (*_BELOW, "min_nodes", "run_config")
    }
    with exit_on(NodeError, RunConfigError, SettingsError, command="edge"):
        node = {**_read(config), **{k.replace("_", "-"): v for k, v in options.items()}}
        node.setdefault("state-dir", str(DEFAULT_STATE_DIR))
        checked = {k.replace("-", "_"): v for k, v in node.items()}
        settings = load_settings(None, {**checked, "edge": "."})  # as the node will have it
        own = {"strategy": strategy, "min-nodes": min_nodes, **_overrides(run_config or [])}

    from flwr_distill.fleet.edge import Below, Edge, EdgeStartError  # here: imports Flower
    from flwr_distill.fleet.federation_record import FederationRunsError
    from flwr_distill.fleet.servers import ServerCertificate
    from flwr_distill.flower.line_1_32.fleet.superlink import SuperLinkError

    certificate = None
    if not below_insecure:
        files = [below_certificates / name for name in ("ca.crt", "server.crt", "server.key")]
        if missing := [str(file) for file in files if not file.exists()]:
            fail(
                f"below-certificates: {missing[0]} does not exist (make it with flwr-distill certs "
                "init and certs server, or give --below-insecure)",
                "edge",
            )
        certificate = ServerCertificate(*files)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends it like Ctrl-C
    below = Below(below_address, certificate, own)
    typer.echo(f"nodes sign on at {below_address}, logs in {settings.state_dir}")
    errors = (EdgeStartError, FederationRunsError, SuperLinkError, ValueError)
    with exit_on(*errors, command="edge"):
        try:
            Edge(node, settings.state_dir, below, APP_DIR).run()
        except KeyboardInterrupt:
            typer.echo("the edge has ended")


def _read(config: Path | None) -> dict[str, Any]:
    """A YAML file of node settings, whose mistakes are said here."""
    load_settings(config, {})
    content = yaml.safe_load(config.read_text(encoding="utf-8")) if config else {}
    return {str(key).replace("_", "-"): value for key, value in content.items()}


def _overrides(texts: list[str]) -> dict[str, RunConfigValue]:
    """Settings of the runs below, checked as far as they can be without a run above."""
    from flwr_distill.fleet.edge_runs import FIXED  # here: imports Flower
    from flwr_distill.server.settings import RunSettings

    own: dict[str, RunConfigValue] = {}
    for text in texts:
        own |= read_run_config(text)
    if taken := sorted(own.keys() & set(FIXED)):
        raise SettingsError(f"run-config: {taken[0]} follows from the run above: leave it out")
    RunSettings.from_run_config(own)
    return own
