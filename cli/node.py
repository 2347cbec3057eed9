"""`flwr-distill node`: run a client on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from flwr_distill.cli.errors import exit_on
from flwr_distill.cli.options import (
    AuthKey,
    ConnectTimeout,
    Device,
    FleetAddress,
    Insecure,
    LogLevel,
    NodeConfigFile,
    PeerAddress,
    PeerAuthority,
    PeerCertificate,
    PeerKey,
    PeerNames,
    PeerRevocations,
    PollBusy,
    PollIdle,
    RootCertificates,
    StateDir,
    node_option,
)
from flwr_distill.node.settings import NodeError, load_settings
from flwr_distill.node.supervisor import Node
from flwr_distill.task.errors import SettingsError


def node(
    context: typer.Context,
    config: NodeConfigFile = None,
    name: Annotated[
        str | None,
        node_option("name", "Name of this node in runs, as in ward-3.", "node-PARTITION"),
    ] = None,
    superlink: FleetAddress = None,
    insecure: Insecure = None,
    root_certificates: RootCertificates = None,
    auth_key: AuthKey = None,
    peer_address: PeerAddress = None,
    peer_authority: PeerAuthority = None,
    peer_certificate: PeerCertificate = None,
    peer_key: PeerKey = None,
    peer_revocations: PeerRevocations = None,
    peer_names: PeerNames = None,
    data: Annotated[
        Path | None, node_option("data", "Images by class, .npz or table of this node.")
    ] = None,
    dataset: Annotated[
        str | None,
        node_option("dataset", "Data set of this node, if nodes have different ones."),
    ] = None,
    device: Device = None,
    partition_id: Annotated[
        int | None, node_option("partition-id", "This node's partition of the data set, from 0.")
    ] = None,
    num_partitions: Annotated[
        int | None, node_option("num-partitions", "Number of partitions.")
    ] = None,
    sector: Annotated[
        int | None,
        node_option("sector", "This node's sector (FedHEAD), else the server draws one."),
    ] = None,
    state_dir: StateDir = None,
    threads: Annotated[
        int | None, node_option("threads", "Threads to compute with.", "all cores")
    ] = None,
    log_level: LogLevel = None,
    metrics_port: Annotated[
        int | None, node_option("metrics-port", "Port for Prometheus metrics, without TLS.", "none")
    ] = None,
    connect_timeout: ConnectTimeout = None,
    release_after: Annotated[
        float | None,
        node_option("release-after", "Idle seconds after which (GPU) memory is freed.", "120"),
    ] = None,
    keep_warm: Annotated[
        bool | None,
        typer.Option(
            "--keep-warm",
            help="Keep PyTorch loaded when idle.",
            envvar="FLWR_DISTILL_KEEP_WARM",
        ),
    ] = None,
    poll_busy: PollBusy = None,
    poll_idle: PollIdle = None,
    keep_runs: Annotated[
        float | None,
        node_option("keep-runs", "Days to keep files of runs, except budgets.", "30"),
    ] = None,
    policy: Annotated[
        str | None,
        node_option(
            "policy", "What runs may do: standard, open, hospital, or a YAML file.", "standard"
        ),
    ] = None,
    node_config: Annotated[
        list[str] | None,
        typer.Option("--node-config", help="More node config, KEY=VALUE; can be repeated."),
    ] = None,
) -> None:
    """Run a client: connect to a SuperLink and work for its runs, until Ctrl-C.

    One warm process with torch, the app and its data serves all messages, on a GPU if there is one.
    When idle it ends, and the next message starts it again, unless --keep-warm is given. With
    Flower versions other than 1.32 and 1.41, Flower starts a process for each message. Versions
    other than 1.32 need --policy open (docs/flower.md).
    The node restarts failed processes, and waits while the SuperLink is down. If it cannot work, it
    prints the reason in one line and exits with 1.

    Every option can be a line of a YAML file (superlink: host:9092) or an environment variable
    (FLWR_DISTILL_SUPERLINK=host:9092).

    On a GPU machine: flwr-distill node --superlink HOST:9092 --root-certificates ca.crt
    --auth-key node.key --data DIR --device cuda
    """
    options = {k: v for k, v in context.params.items() if k not in ("config", "node_config")}
    with exit_on(NodeError, SettingsError, command="node"):
        if node_config:
            options["node_config"] = dict(_pair(text) for text in node_config)
        Node(load_settings(config, options)).run()


def _pair(text: str) -> tuple[str, Any]:
    """VALUE is a number, a boolean or a text as in YAML."""
    key, separator, value = text.partition("=")
    if not key or not separator:
        raise SettingsError("must be KEY=VALUE", where="node-config", value=text, remedy="site=lab")
    return key, yaml.safe_load(value)
