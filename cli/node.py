"""`flwr-distill node`: run a client on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from cli.errors import exit_on
from node.settings import NodeError, load_settings
from node.supervisor import Node


def _option(name: str, help_text: str, default: str | bool = False) -> Any:
    """An option that is also an environment variable."""
    variable = "FLWR_DISTILL_" + name.upper().replace("-", "_")
    return typer.Option(f"--{name}", help=help_text, envvar=variable, show_default=default)


def node(
    context: typer.Context,
    config: Annotated[
        Path | None,
        _option("config", "YAML file with any of these options; the command line overrides it."),
    ] = None,
    superlink: Annotated[
        str | None, _option("superlink", "SuperLink's Fleet API, host:port.", "127.0.0.1:9092")
    ] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="No TLS.", envvar="FLWR_DISTILL_INSECURE")
    ] = None,
    root_certificates: Annotated[
        Path | None,
        _option(
            "root-certificates",
            "PEM file of the SuperLink's authority.",
            "the system's",
        ),
    ] = None,
    auth_key: Annotated[
        Path | None,
        _option("auth-key", "Private key of this node, if the SuperLink needs one."),
    ] = None,
    peer_address: Annotated[
        str | None,
        _option("peer-address", "host:port where other nodes can send to this one directly."),
    ] = None,
    peer_certificate: Annotated[
        Path | None,
        _option("peer-certificate", "PEM file of this node's certificate among its peers."),
    ] = None,
    peer_key: Annotated[
        Path | None, _option("peer-key", "PEM file of that certificate's private key.")
    ] = None,
    data: Annotated[Path | None, _option("data", "Directory with this node's data.")] = None,
    dataset: Annotated[
        str | None, _option("dataset", "Data set of this node, where nodes hold different ones.")
    ] = None,
    device: Annotated[
        str | None,
        _option(
            "device",
            "cpu; cuda:N, that GPU; cuda, the one that fewest nodes use; auto, like cuda, but the "
            "CPU if there is none.",
            "auto",
        ),
    ] = None,
    partition_id: Annotated[
        int | None, _option("partition-id", "This node's partition of the data set, from 0.")
    ] = None,
    num_partitions: Annotated[
        int | None, _option("num-partitions", "Number of partitions.")
    ] = None,
    sector: Annotated[
        int | None, _option("sector", "This node's sector (FedHEAD), else the server draws one.")
    ] = None,
    state_dir: Annotated[
        Path | None, _option("state-dir", "Directory of this node's own files.", "state/node")
    ] = None,
    threads: Annotated[
        int | None, _option("threads", "Threads to compute with.", "all cores")
    ] = None,
    log_level: Annotated[
        str | None, _option("log-level", "DEBUG, INFO, WARNING or ERROR.", "INFO")
    ] = None,
    metrics_port: Annotated[
        int | None, _option("metrics-port", "Port for Prometheus metrics, without TLS.", "none")
    ] = None,
    connect_timeout: Annotated[
        float | None,
        _option("connect-timeout", "Seconds to wait for the SuperLink at the start.", "60"),
    ] = None,
    release_after: Annotated[
        float | None,
        _option("release-after", "Idle seconds after which (GPU) memory is freed.", "120"),
    ] = None,
    node_config: Annotated[
        list[str] | None,
        typer.Option("--node-config", help="More node config, KEY=VALUE; can be repeated."),
    ] = None,
) -> None:
    """Run a client: connect to a SuperLink and work for its runs, until Ctrl-C.

    One warm process with torch, the app and its data serves all messages, on a GPU if there is one.
    The node restarts its processes if they fail, and waits out outages of the SuperLink. If it
    cannot work, it says why in one line and exits with 1.

    Every option can be a line of a YAML file (superlink: host:9092) or an environment variable
    (FLWR_DISTILL_SUPERLINK=host:9092).

    On a GPU machine: flwr-distill node --superlink HOST:9092 --root-certificates ca.crt
    --auth-key node.key --data DIR --device cuda:0
    """
    options = {k: v for k, v in context.params.items() if k not in ("config", "node_config")}
    with exit_on(NodeError, command="node"):
        if node_config:
            options["node_config"] = dict(_pair(text) for text in node_config)
        Node(load_settings(config, options)).run()


def _pair(text: str) -> tuple[str, Any]:
    # VALUE is a number, a boolean or a text as in YAML.
    key, separator, value = text.partition("=")
    if not key or not separator:
        raise NodeError(f"node-config={text}: give KEY=VALUE, as in site=lab")
    return key, yaml.safe_load(value)
