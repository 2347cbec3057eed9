"""Runs a federation on this machine, without a SuperLink."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from flwr.app import Context, RecordDict

from flwr_distill.flower.task_identity import identify
from flwr_distill.node.kernel import trim_heap
from flwr_distill.protocol.messages import SIMULATED
from flwr_distill.simulation.coded import Coded
from flwr_distill.simulation.grid import Pool, SimulationGrid
from flwr_distill.simulation.workers import Config, OnAnswer, Workers
from flwr_distill.storage.store import DURABLE
from flwr_distill.task.errors import ReportedError
from flwr_distill.task.settings import TaskSettings
from flwr_distill.task.source import read_dataset, take_dataset

if TYPE_CHECKING:
    from flwr_distill.node.policy import Policy

FIRST_NODE = 2**64 - 1_000_000
"""As large as Flower's node ids, which fit neither a float nor a signed 64-bit integer."""


def simulate(
    run_config: Config,
    nodes: Sequence[Config],
    runs_dir: Path,
    *,
    workers: int | None = None,
    policy: Policy | None = None,
    run_id: int | None = None,
    on_answer: OnAnswer = lambda message, seconds: None,
) -> Path:
    """Run a strategy on virtual nodes: the real ServerApp here, the real ClientApp in workers.

    One seed gives one model, whatever the number of workers, and the one that real processes give.

    Parameters
    ----------
    run_config : Mapping[str, bool | int | float | str]
        Flat, as for ``-c``.
    nodes : Sequence[Mapping[str, bool | int | float | str]]
        Node config of each; ``partition-id`` is its place by default.
    runs_dir : Path
        For the run's folder, and the nodes' state in ``nodes``: a resumed run needs both.
    workers : int, optional (default: None)
        Processes that train; None for one a core, or one a GPU if nodes compute on these.
    policy : Policy, optional (default: None)
        Of each node, whose state is then in ``nodes/node-N``; None for none.
    run_id : int, optional (default: None)
        Names the run's folder; None for a random one.
    on_answer : callable, optional
        Called with each answered message, and the seconds that its worker took.

    Returns
    -------
    Path
        Folder of a new run's results; a resumed run continues in its own.

    Raises
    ------
    WorkerError
        If workers cannot start, or keep dying.
    NodeError
        If a node cannot keep the policy.
    """
    run_id = run_id or secrets.randbits(63)
    config = {"min-nodes": len(nodes), **run_config, "runs-dir": str(runs_dir)}
    folder = runs_dir / "nodes"
    by_id: dict[int, Config] = {
        FIRST_NODE + place: {
            "partition-id": place,
            "state-dir": str(folder / f"node-{place}" if policy else folder),
            **own,
            **({SIMULATED: 0} if policy else {DURABLE: False}),  # budgets of privacy are to last
        }
        for place, own in enumerate(nodes)
    }
    if policy is not None:
        from flwr_distill.simulation import guarded  # here: without, workers start at once

        by_id = {node: guarded.config_under(policy, own) for node, own in by_id.items()}
    count = workers or _num_workers(list(by_id.values()))
    with Workers(by_id, run_id, config, count, on_answer=on_answer) as started:
        from flwr_distill.server.app import main  # here: meanwhile the workers import theirs

        identify(0, run_id, 1)
        _share_dataset(started, config, nodes)
        pool: Pool = started
        if policy is not None:
            pool = guarded.Guarded(started, by_id, policy, run_id, config)
        main(
            SimulationGrid(by_id, Coded(pool, by_id, run_id)),
            Context(run_id, 1, {}, RecordDict(), config),
        )
    return runs_dir / str(run_id)


def _share_dataset(workers: Workers, run_config: Config, nodes: Sequence[Config]) -> None:
    """Have server and workers map one copy of the run's data set, where all read the same."""
    roots = {str(node.get("data-root", "")) for node in nodes}
    with suppress(ReportedError):  # of the settings or data: the server reports it
        settings = TaskSettings.from_run_config(run_config)
        if len(roots) == 1 and (read := read_dataset(settings, *roots)):
            take_dataset(workers.share(read))
            del read
            trim_heap()  # of the copy that was read


def on_devices(nodes: Sequence[Config], device: str) -> list[Config]:
    """Node configs with a device each: for ``auto`` and ``cuda`` all GPUs in turn.

    Nodes whose configs are equal differ in their partition alone: they may work in batches.
    """
    count = torch.cuda.device_count() if device in ("auto", "cuda") else 0
    devices = [f"cuda:{number}" for number in range(count)] or [device]
    alike: Config = {SIMULATED: len(devices)} if all(own == nodes[0] for own in nodes) else {}
    return [
        {**own, **alike, "device": devices[place % len(devices)]} for place, own in enumerate(nodes)
    ]


def _num_workers(nodes: Sequence[Config]) -> int:
    """Workers for nodes by default."""
    gpus = {str(node.get("device")) for node in nodes if "cuda" in str(node.get("device"))}
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return min(len(nodes), len(gpus) or cores)
