"""A federation of real processes whose nodes share a GPU, and the same one on the CPU.

``python -m benchmarks.device_federation --data-root DIR [--device cuda] [--quick] [--json FILE]``

A SuperLink and four nodes train with FedAvg and HFLDD on 6,000 images of MNIST, first on the device
and then on the CPU; ``--quick`` has fewer images and rounds, and ``--device cpu`` the CPU alone.
Seconds a round are medians without the first round. Memory is the largest that a node had: on the
GPU as the driver reports it (where it cannot, the card's use beyond that before, in equal parts),
on the host PSS. Accuracy is that of the last round on MNIST's test images: of HFLDD the mean of
two seeds, since one seed differs by up to .025 from the next, on any device.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.figures import read_lines, write_json
from benchmarks.goal import Goal
from benchmarks.node_memory import PARTS
from benchmarks.rounds import repeating
from flwr_distill.fleet.local_federation import LocalFederation, LocalNode
from flwr_distill.node.supervisor import status_file
from flwr_distill.task.datasets import Dataset, load_dataset

APP = Path(__file__).resolve().parents[1]
NODES = 4
ACCURACY_NOISE = 0.02
"""Share of test images by which accuracies on two devices may differ: sums in another order."""
SEEDS = {"fedavg": 1, "hfldd": 2}
STRATEGIES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "hfldd": {"hfldd.distill-steps": 20},
}
EVERY = 0.25
"""Seconds between readings of memory."""


def _first(count: int, root: Path, download: bool) -> Dataset:
    data = load_dataset("mnist", root, download=download)
    return Dataset(data.spec, data.train.subset(range(count)), data.test)


mnist_6000 = partial(_first, 6000)
mnist_600 = partial(_first, 600)


class Memory:
    """Largest memory of each node, in MB: ``host`` (PSS), and ``gpu`` where a driver reports it."""

    def __init__(self, nodes: list[LocalNode]) -> None:
        self._nodes = nodes
        self._before = _memory_of_card()
        self.host: dict[str, float] = defaultdict(float)
        self.gpu: dict[str, float] = defaultdict(float)

    def read(self) -> None:
        """Read it now."""
        on_gpu = _gpu_memory()
        for node in self._nodes:
            host = gpu = 0.0
            with suppress(psutil.Error, OSError, ValueError):  # a process or the status has changed
                for process in _processes(node):
                    host += process.memory_full_info().pss / 1e6
                    gpu += on_gpu.get(process.pid, 0.0)
            if not gpu and (used := _memory_of_card()):
                gpu = max(0.0, used - self._before) / len(self._nodes)
            self.host[node.name] = max(self.host[node.name], host)
            self.gpu[node.name] = max(self.gpu[node.name], gpu)


def _processes(node: LocalNode) -> list[psutil.Process]:
    """Those of a node, which are forked by a nursery and so not below each other."""
    status = json.loads(status_file(node.state_dir).read_text(encoding="utf-8"))
    pids = {node.pid, *(status[part] for part in PARTS if part in status)}
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


def _nvidia_smi(query: str) -> list[list[str]]:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.split(", ") for line in done.stdout.splitlines()]


def _gpu_memory() -> dict[int, float]:
    """MB on the GPU by process, as far as the driver says."""
    rows = _nvidia_smi("--query-compute-apps=pid,used_memory")
    return {int(pid): float(mib) * 1.048576 for pid, mib in rows if mib.isdigit()}


def _memory_of_card() -> float:
    """MB in use on the first GPU; 0 without one."""
    rows = _nvidia_smi("--query-gpu=memory.used")
    return float(rows[0][0]) * 1.048576 if rows and rows[0][0].isdigit() else 0.0


def measure(device: str, *, quick: bool, data_root: str) -> list[dict[str, Any]]:
    """Run the strategies on nodes that compute on a device; return a row for each."""
    rows = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        federation = LocalFederation(
            NODES,
            folder / "federation",
            node_config={"data-root": data_root},
            node_settings={"device": device, "threads": max(1, (os.cpu_count() or 1) // NODES)},
        )
        with federation:
            start = time.monotonic() - began
            for strategy, settings in STRATEGIES.items():
                memory = Memory(federation.nodes)
                by_seed = []
                with repeating(memory.read, every=EVERY):
                    for seed in range(1 if quick else SEEDS[strategy]):
                        config = {**settings, "seed": seed}
                        by_seed.append(
                            run(federation, strategy, config, folder, device, quick, data_root)
                        )
                seconds = [
                    [b["seconds"] - a["seconds"] for a, b in pairwise(each)] for each in by_seed
                ]
                accuracies = [by_round[-1]["accuracy"] for by_round in by_seed]
                rows.append(
                    {
                        "strategy": strategy,
                        "device": device,
                        "start_seconds": start,
                        "first_round_seconds": seconds[0][0],
                        "round_seconds": statistics.median(s for each in seconds for s in each[1:]),
                        "accuracy": statistics.mean(accuracies),
                        "accuracies": accuracies,
                        "rounds": len(seconds[0]),
                        "node_mb": max(memory.host.values()),
                        "node_gpu_mb": max(memory.gpu.values()) if device != "cpu" else None,
                    }
                )
                print(line(rows[-1]), flush=True)
    return rows


def run(
    federation: LocalFederation,
    strategy: str,
    settings: dict[str, Any],
    folder: Path,
    device: str,
    quick: bool,
    data_root: str,
) -> list[dict[str, Any]]:
    """Run a strategy; return the lines of its ``metrics.jsonl``."""
    runs = folder / f"runs-{strategy}-{settings['seed']}"
    config = {
        "strategy": strategy,
        "num-rounds": 2 if quick else 4,
        "min-nodes": NODES,
        "dataset": f"benchmarks.device_federation:mnist_{600 if quick else 6000}",
        "data-root": data_root,
        "model": "hfldd-mnist",
        "partition.scheme": "pathological",
        "partition.classes": 5,
        "server-device": device,
        "runs-dir": str(runs),
        **settings,
    }
    outcome = federation.run(APP, config, timeout=120)
    if not outcome.completed:
        raise RuntimeError(f"{strategy} on {device} failed:\n" + "\n".join(outcome.lines[-40:]))
    (metrics,) = runs.glob("*/metrics.jsonl")
    return read_lines(metrics)


def goals(rows: list[dict[str, Any]]) -> list[Goal]:
    """Whether accuracies on the device are those on the CPU."""
    by_place = {(row["strategy"], row["device"] == "cpu"): row["accuracy"] for row in rows}
    return [
        Goal(
            f"{strategy}: difference of accuracies on GPU and CPU",
            [abs(by_place[strategy, False] - by_place[strategy, True])],
            at_most=ACCURACY_NOISE,
        )
        for strategy in STRATEGIES
        if (strategy, False) in by_place and (strategy, True) in by_place
    ]


def line(row: dict[str, Any]) -> str:
    """A row in words."""
    on_gpu = "" if row["node_gpu_mb"] is None else f" and {row['node_gpu_mb']:.0f} MB of the GPU"
    return (
        f"{row['strategy']} on {row['device']}: started in {row['start_seconds']:.1f} s, "
        f"{row['round_seconds']:.2f} s a round (the first {row['first_round_seconds']:.2f}), "
        f"accuracy {row['accuracy']:.3f} after {row['rounds']} "
        f"({', '.join(f'{accuracy:.3f}' for accuracy in row['accuracies'])}), "
        f"{row['node_mb']:.0f} MB{on_gpu} a node"
    )


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(prog="benchmarks.device_federation", description=__doc__)
    parser.add_argument("--data-root", required=True, help="folder with MNIST")
    parser.add_argument("--device", default="cuda", help="of the nodes; default: cuda")
    parser.add_argument("--quick", action="store_true", help="few images and rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    arguments = parser.parse_args()
    root = str(Path(arguments.data_root).resolve())
    rows: list[dict[str, Any]] = []
    for device in dict.fromkeys([arguments.device, "cpu"]):
        rows += measure(device, quick=arguments.quick, data_root=root)
        if arguments.json is not None:  # after each device, to keep it if the next one fails
            report = {
                "rows": rows,
                "goals": [goal.as_json() for goal in goals(rows)],
                "cores": os.cpu_count(),
                "torch": torch.__version__,
            }
            write_json(arguments.json, report)


if __name__ == "__main__":
    main()
