"""Waits for what other processes and threads do, within a deadline."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from flwr_distill.node.supervisor import status_file

PAUSE = 0.02


def wait_until(
    what: Callable[[], Any], seconds: float = 60.0, why: Callable[[], Any] = lambda: ""
) -> Any:
    """Wait until `what` gives something true, and return that; else `why` says what there is."""
    deadline = time.monotonic() + seconds
    while not (result := what()):
        assert time.monotonic() < deadline, why()
        time.sleep(PAUSE)
    return result


def node_status(state_dir: Path) -> dict[str, Any]:
    """A node's status file; empty while there is none."""
    with suppress(FileNotFoundError):
        status: dict[str, Any] = json.loads(status_file(state_dir).read_text())
        return status
    return {}


def wait_for_node(state_dir: Path, log: Path, *parts: str) -> dict[str, Any]:
    """Wait until a node is online and has these parts; return its status."""
    wanted = {"online", *parts}
    wait_until(lambda: wanted <= node_status(state_dir).keys(), 120, log.read_text)
    return node_status(state_dir)
