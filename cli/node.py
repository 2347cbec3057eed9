"""`flwr-distill node`: run a client on this machine."""

from __future__ import annotations

from typing import Annotated, Any

import typer
import yaml

from flwr_distill.cli.errors import exit_on
from flwr_distill.cli.options import NODE_OPTIONS, NodeConfigFile, with_node_options
from flwr_distill.node.settings import NodeError, load_settings
from flwr_distill.node.supervisor import Node
from flwr_distill.task.errors import SettingsError


@with_node_options(*NODE_OPTIONS)
def node(
    settings: dict[str, Any],
    config: NodeConfigFile = None,
    node_config: Annotated[
        list[str] | None,
        typer.Option("--node-config", help="More node config, KEY=VALUE; can be repeated."),
    ] = None,
) -> None:
    """Run a client: connect to a SuperLink and work for its runs, until Ctrl-C.

    One warm process with torch, the app and its data serves all messages, on a GPU if there is one.
    When idle it ends, and the next message starts it again, unless --keep-warm is given. With
    Flower 1.33, 1.34 and from 1.43 on, Flower starts a process for each message, and nodes need
    --policy open (docs/flower.md).
    The node restarts failed processes, and waits while the SuperLink is down. If it cannot work, it
    prints the reason in one line and exits with 1.

    Every option can be a line of a YAML file (superlink: host:9092) or an environment variable
    (FLWR_DISTILL_SUPERLINK=host:9092).

    On a GPU machine: flwr-distill node --superlink HOST:9092 --root-certificates ca.crt
    --auth-key node.key --data DIR --device cuda
    """
    with exit_on(NodeError, SettingsError, command="node"):
        if node_config:
            settings["node_config"] = dict(_pair(text) for text in node_config)
        Node(load_settings(config, settings)).run()


def _pair(text: str) -> tuple[str, Any]:
    """VALUE is a number, a boolean or a text as in YAML."""
    key, separator, value = text.partition("=")
    if not key or not separator:
        raise SettingsError("must be KEY=VALUE", where="node-config", value=text, remedy="site=lab")
    return key, yaml.safe_load(value)
