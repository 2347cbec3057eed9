"""A node on another Flower than 1.32: what is missing, and how to start Flower's own SuperNode.

That one does all the work where `flower` has no folder for the installed line. Then there is
nothing between SuperLink and app.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from flwr_distill.node.policy import OPEN
from flwr_distill.node.settings import NodeError, NodeSettings

LINE = "1.32."
"""The Flower on which nodes do all that they can."""
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
"""Environment in which Flower's programs report nothing and ask for no update."""
OVER_HTTP, CONTROL_OVER_HTTP, FLEET_OVER_HTTP = (1, 35), (1, 37), (1, 40)
"""Since these Flowers, apps ask over HTTP, then users, then nodes; at a SuperLink at one port."""


def installed_line() -> tuple[int, ...]:
    """The installed Flower's line, such as (1, 32)."""
    return tuple(map(int, version("flwr").split(".")[:2]))


def is_another() -> bool:
    """Whether the installed Flower is another than 1.32."""
    return not version("flwr").startswith(LINE)


def is_stock() -> bool:
    """Whether the installed Flower's own SuperNode does all the work."""
    # By name: the room `flower` stands above this one.
    return not import_module("flwr_distill.flower.lines").folder_for("node")


def check_another(settings: NodeSettings) -> str:
    """Return what to log on another Flower than 1.32; NodeError if that cannot do what is set."""
    installed = version("flwr")
    if not is_stock():
        return f"flwr {installed}: what differs is in docs/flower.md"
    if settings.policy != OPEN:
        raise NodeError(
            f"cannot be enforced with flwr {installed}",
            where="policy",
            remedy="give policy=open, which lets runs ask for anything, or install flwr==1.32.1",
        )
    if settings.metrics_port is not None:
        raise NodeError(
            f"Flower's own SuperNode has no metrics with flwr {installed}",
            where="metrics-port",
            value=settings.metrics_port,
            remedy="drop it, or install flwr==1.32.1",
        )
    for name, value in (("max-rate", settings.max_rate), ("quiet-hours", settings.quiet_hours)):
        if value is not None:
            raise NodeError(
                f"Flower's own SuperNode does not limit its link with flwr {installed}",
                where=name,
                value=value,
                remedy="drop it, or install flwr==1.32.1",
            )
    if settings.log_format != "text":
        raise NodeError(
            f"Flower's own SuperNode writes text alone with flwr {installed}",
            where="log-format",
            value=settings.log_format,
            remedy="drop it, or install flwr==1.32.1",
        )
    return (
        f"flwr {installed}: Flower's own SuperNode does the work, with a process for each message, "
        "which is slower (docs/flower.md)"
    )


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which Flower's servers find its other programs."""
    programs = str(Path(sys.executable).parent)
    return {**env, "PATH": os.pathsep.join([programs, env.get("PATH", os.defpath)])}


def supernode_command(settings: NodeSettings, node_config: Path, port: int) -> list[str]:
    """Return the command of Flower's own SuperNode, which serves apps at a port on loopback."""
    return [
        str(Path(sys.executable).with_name("flower-supernode")),
        *("--superlink", settings.superlink, "--node-config", str(node_config)),
        *appio_arguments(port),
        *connection_arguments(settings),
    ]


def appio_arguments(port: int) -> list[str]:
    """Return any SuperNode's arguments for where on loopback its apps find it."""
    if installed_line() < OVER_HTTP:
        return ["--clientappio-api-address", f"127.0.0.1:{port}"]
    return ["--host", "127.0.0.1", "--port", str(port)]


def connection_arguments(settings: NodeSettings) -> list[str]:
    """Return any SuperNode's arguments for TLS and its key."""
    arguments = ["--insecure"] if settings.insecure else []
    if settings.root_certificates is not None:
        arguments += ["--root-certificates", str(settings.root_certificates)]
    if settings.auth_key is not None:
        arguments += ["--auth-supernode-private-key", str(settings.auth_key)]
    return arguments
