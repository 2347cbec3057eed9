"""The nodes of a federation: what the SuperLink, runs and this machine's own nodes say of each."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from flwr_distill.base import json_lines
from flwr_distill.fleet.dashboard.files import open_file, read_json
from flwr_distill.fleet.dashboard.runs import Run, RunNode, text_of
from flwr_distill.flower.control import KnownNode
from flwr_distill.node.log_lines import without_level
from flwr_distill.node.supervisor import status_file

SIZES = (100, 1_000, 10_000, 100_000, 1_000_000)
"""Bounds of the classes of sizes, in samples."""
TAIL = 64 * 2**10
"""Bytes at the end of a node's log that are read."""


@dataclass(frozen=True)
class LocalNode:
    """A node of this machine by its state directory; `node_id` is Flower's, 0 if it is not online.

    `last_line` is the last line of its log, and `since` its time.
    """

    name: str
    folder: Path
    node_id: int = 0
    device: str = ""
    runs: bool = False
    last_line: str = ""
    since: float = 0.0


@dataclass(frozen=True)
class Node:
    """A node as the dashboard shows it; unknown texts are empty.

    Parameters
    ----------
    status : str
        ``online``, ``offline`` or what else the SuperLink says; ``cut off`` if it does not answer.
        ``not running`` and ``not connected`` are of this machine's nodes.
    since : float
        When the status began, in seconds since 1970; 0 if unknown.
    size : str
        Class of its number of samples, as in ``100 to 1,000``.
    work : str
        What it does for which run.
    error : str
        What went wrong last, and `error_time` when; 0 if unknown.
    local : str
        Name of its page of what left it, if it is on this machine.
    """

    node_id: int
    name: str
    status: str
    since: float
    version: str = ""
    device: str = ""
    size: str = ""
    work: str = ""
    error: str = ""
    error_time: float = 0.0
    local: str = ""

    @property
    def is_online(self) -> bool:
        """Whether it can work."""
        return self.status == "online"


def all_nodes(
    known: Iterable[KnownNode],
    runs: Sequence[Run],
    local: Sequence[LocalNode],
    names_by_key: Mapping[str, str],
) -> list[Node]:
    """All nodes, those that are not online first; `runs` are from the latest to the oldest."""
    own = {node.node_id: node for node in local if node.node_id}
    described: dict[str, RunNode] = {}
    for run in runs:
        for node_id, description in run.nodes.items():
            described.setdefault(node_id, description)
    errors, work = _errors(runs), _work(runs)
    nodes = []
    for each in known:
        if each.status == "unregistered":
            continue
        about, here = described.get(str(each.node_id)), own.get(each.node_id)
        registered = names_by_key.get(each.public_key) if each.public_key else None
        name = registered or (about.name if about else here.name if here else "")
        moment, error = errors.get(about.name, (0.0, "")) if about else (0.0, "")
        nodes.append(
            Node(
                each.node_id,
                name or f"node …{str(each.node_id)[-5:]}",
                each.status,
                each.since,
                version=about.version if about else "",
                device=(about.device if about else "") or (here.device if here else ""),
                size=size_class(about.samples) if about else "",
                work=work.get(about.name, "") if about and each.status == "online" else "",
                error=error,
                error_time=moment,
                local=here.name if here else "",
            )
        )
    shown = {node.node_id for node in nodes if node.is_online}
    away = [here for here in local if here.node_id not in shown]
    gone = {here.name for here in away}  # else its former id is listed beside it
    nodes = [node for node in nodes if node.is_online or node.name not in gone]
    nodes += [_away(here, errors) for here in away]
    return sorted(nodes, key=lambda node: (node.is_online, len(node.name), node.name))


def read_local(folders: Iterable[Path]) -> list[LocalNode]:
    """The nodes of this machine, by their state directories."""
    nodes, names = [], set[str]()
    for folder in map(Path, map(os.path.abspath, folders)):  # "." and ".." have no name
        name, count = folder.name, 1
        while name in names:
            count += 1
            name = f"{folder.name}-{count}"
        names.add(name)
        nodes.append(_local(name, folder))
    return nodes


def size_class(samples: int | None) -> str:
    """Class of a number of samples: ``100 to 1,000`` of 250."""
    if samples is None:
        return ""
    if samples < SIZES[0]:
        return f"under {SIZES[0]}"
    for low, high in pairwise(SIZES):
        if samples < high:
            return f"{low:,} to {high:,}"
    return f"{SIZES[-1]:,} or more"


def _local(name: str, folder: Path) -> LocalNode:
    status: Mapping[str, Any] = read_json(status_file(folder), 2**16)
    log = folder / "node.log"
    since = 0.0
    with suppress(OSError):  # missing, or another user's
        since = log.stat().st_mtime
    node = LocalNode(name, folder, last_line=_last_line(log), since=since)
    pid = status.get("pid")
    if not isinstance(pid, int) or not _runs(pid):
        return node
    online = status.get("online")
    return replace(
        node,
        node_id=online if isinstance(online, int) else 0,
        device=text_of(status.get("device"), 80),
        runs=True,
    )


def _runs(pid: int) -> bool:
    with suppress(OSError, OverflowError):
        os.kill(pid, 0)
        return True
    return False


def _last_line(log: Path) -> str:
    try:
        with open_file(log) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            lines = file.read(TAIL).decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    line = next((line for line in reversed(lines) if line.strip()), "")
    entry = json_lines.read(line)
    return text_of(entry.text if entry else without_level(line)[1])


def _away(here: LocalNode, errors: Mapping[str, tuple[float, str]]) -> Node:
    """A node of this machine that is not online."""
    moment, error = errors.get(here.name, (0.0, ""))
    status = "not connected" if here.runs else "not running"
    return Node(
        here.node_id,
        here.name,
        status,
        here.since,
        device=here.device,
        error=here.last_line or error,
        error_time=0.0 if here.last_line else moment,
        local=here.name,
    )


def _errors(runs: Sequence[Run]) -> dict[str, tuple[float, str]]:
    """Time and text of what went wrong last, by node name."""
    latest: dict[str, tuple[float, str]] = {}
    for run in runs:
        for problem in run.problems:
            if problem.node and problem.time > latest.get(problem.node, (-1.0, ""))[0]:
                latest[problem.node] = (problem.time, f"{problem.text} (run {run.run_id[:6]})")
    return latest


def _work(runs: Sequence[Run]) -> dict[str, str]:
    """What awaited nodes do, by name."""
    return {
        name: f"{run.phase.title}, round {run.round + 1} of run {run.run_id[:6]}, since "
        f"{time.strftime('%H:%M:%S', time.localtime(run.phase.since))}"
        for run in reversed(runs)
        if run.phase
        for name in run.phase.awaited
    }
