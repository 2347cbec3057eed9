"""Memory and speed with many nodes and large models.

``python -m benchmarks.load [--quick] [--json FILE]``

- *virtual*: 200 virtual nodes, 50 rounds of FedAvg on digits, server and nodes in one process;
- *real*: the same with 20 real nodes and a real server, several processes each;
- *aggregation*: memory the server adds to average models (8 MB) of 10, 50 and 200 nodes;
- *large*: one model of 1 GB to a node and back, between real processes;
- *trained*: peaks of real processes in which two nodes train a model of 256 MB for three rounds.

Memory is resident memory; shared pages count for each process. Growth is from the second fifth of a
run to the last. ``--quick`` uses 50 and 4 nodes, 10 rounds, 10 and 50 models, 100 and 64 MB.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import resource
import statistics
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from rich.console import Console
from rich.table import Table

from benchmarks.figures import read_lines, write_json
from benchmarks.in_process import InProcessGrid, run_in_process
from benchmarks.rounds import APP_DIR as ECHO_APP
from benchmarks.rounds import kind_of, peak_memory, processes, repeating
from benchmarks.wide_network import MEGABYTES
from flwr_distill.fleet.local_federation import LocalFederation
from flwr_distill.node.nursery import SERVER_APP
from flwr_distill.protocol.arrays import as_record
from flwr_distill.server.grid.grid import RunGrid
from flwr_distill.server.grid.transport import Transport
from flwr_distill.strategies.common.checked import CheckedFedAvg

APP_DIR = Path(__file__).resolve().parent.parent
SAMPLE_EVERY = 1.0
MODEL_ARRAYS, ARRAY_FLOATS = 8, 250_000
SETTINGS: dict[str, str | int] = {
    "strategy": "fedavg",
    "partition.scheme": "iid",
    "train.local-epochs": 1,
    "train.batch-size": 32,
}
Sizes = dict[str, int]


@contextmanager
def sampled(read: Callable[[], Sizes]) -> Iterator[dict[str, list[int]]]:
    """Read sizes by name every second."""
    series: dict[str, list[int]] = defaultdict(list)

    def sample() -> None:
        for name, size in read().items():
            series[name].append(size)

    with repeating(sample, every=SAMPLE_EVERY):
        yield series


def resident(running: Iterable[psutil.Process]) -> int:
    """Resident memory of processes."""
    total = 0
    for process in running:
        with suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


def memory_of(federation: LocalFederation) -> Sizes:
    """Resident memory of a federation's SuperLink, ServerApp and nodes."""
    apps = [process for process in processes(federation) if kind_of(process) == SERVER_APP]
    sizes = {
        "SuperLink": resident([psutil.Process(federation.superlink_pid)]),
        "nodes": resident(processes(federation, nodes_only=True)),
        "ServerApp": resident(apps),
    }
    return {name: size for name, size in sizes.items() if size}


def summary(series: list[int]) -> dict[str, float]:
    """Megabytes when warm and at the end, and growth in per cent."""
    fifth = max(len(series) // 5, 1)
    warm, end = statistics.median(series[fifth : 2 * fifth]), statistics.median(series[-fifth:])
    return {"warm_mb": warm / 1e6, "end_mb": end / 1e6, "growth_percent": 100 * (end / warm - 1)}


def throughput(rows: list[dict[str, Any]], nodes: int) -> dict[str, float]:
    """Seconds of a run, and nodes trained and averaged per second."""
    seconds = rows[-1]["seconds"] - rows[0]["seconds"]
    return {"seconds": seconds, "nodes_per_second": nodes * (len(rows) - 1) / seconds}


def run_virtual(nodes: int, rounds: int) -> list[dict[str, Any]]:
    """Run virtual nodes in this process."""
    return run_in_process({**SETTINGS, "num-rounds": rounds}, [{"num-partitions": nodes}] * nodes)


def measure_virtual(nodes: int, rounds: int) -> dict[str, Any]:
    """Measure server and virtual nodes in one process."""
    with new_process() as pool:
        process = psutil.Process(pool.submit(os.getpid).result())
        running = pool.submit(run_virtual, nodes, rounds)
        with sampled(lambda: {"server and nodes": resident([process])}) as series:
            rows = running.result()
    return {
        "nodes": nodes,
        "rounds": rounds,
        **throughput(rows, nodes),
        "memory": {name: summary(sizes) for name, sizes in series.items()},
        "series": dict(series),
    }


def measure_real(nodes: int, rounds: int) -> dict[str, Any]:
    """Measure a server and nodes as real processes."""
    with tempfile.TemporaryDirectory() as directory:
        federation, warm = LocalFederation(nodes, Path(directory)), threading.Event()
        federation.start(timeout=600)

        def on_line(line: str) -> None:
            if "[ROUND 2/" in line:
                warm.set()

        with federation, sampled(lambda: memory_of(federation) if warm.is_set() else {}) as series:
            runs_dir = federation.state_dir / "runs"
            settings = {"num-rounds": rounds, "min-nodes": nodes, "runs-dir": str(runs_dir)}
            settings = {**SETTINGS, **settings}
            outcome = federation.run(APP_DIR, settings, on_line=on_line, timeout=1800)
            if not outcome.completed:
                raise RuntimeError("the run failed:\n" + "\n".join(outcome.lines[-40:]))
            rows = read_lines(runs_dir / str(outcome.run_id) / "metrics.jsonl")
    return {
        "nodes": nodes,
        "rounds": rounds,
        **throughput(rows, nodes),
        "memory": {name: summary(sizes) for name, sizes in series.items()},
        "series": dict(series),
    }


class OneByOneGrid(InProcessGrid):
    """Runs a node when its reply is pulled, so that the grid stores no replies."""

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Store the messages."""
        self._messages = {str(next(self._ids)): message for message in messages}
        for message_id, message in self._messages.items():
            message.metadata.__dict__["_message_id"] = message_id
        return list(self._messages)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Run one node."""
        message = self._messages.pop(min(message_ids, key=int))
        content = self.nodes[message.metadata.dst_node_id](message)
        return [] if content is None else [Message(content, reply_to=message)]


def model(seed: int) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """A random model of 8 MB."""
    generator = np.random.default_rng(seed)
    return {
        f"layer{i}": generator.standard_normal(ARRAY_FLOATS, dtype=np.float32)
        for i in range(MODEL_ARRAYS)
    }


def trained(message: Message) -> RecordDict:
    """Reply of a node that has trained."""
    metrics = MetricRecord({"num-examples": 10, "train-loss": 1.0})
    return RecordDict(
        {"arrays": as_record(model(message.metadata.dst_node_id)), "metrics": metrics}
    )


def aggregation(strategy: type[FedAvg], nodes: int) -> float:
    """Peak memory of a round of a strategy, in MB, minus the memory before it."""
    grid = RunGrid(Transport(OneByOneGrid(dict.fromkeys(range(nodes), trained)), deadline=600))
    averaging = strategy(min_train_nodes=1, min_available_nodes=1)
    start = as_record(model(nodes))
    before: int = psutil.Process().memory_info().rss
    messages = averaging.configure_train(1, start, ConfigRecord(), grid)
    arrays, _ = averaging.aggregate_train(1, grid.send_and_receive(messages))
    if arrays is None:
        raise RuntimeError("nothing was averaged")
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / 1e6


def measure_aggregation(counts: Iterable[int]) -> dict[str, dict[int, float]]:
    """Peaks of Flower's FedAvg and of our CheckedFedAvg, by number of nodes."""
    peaks: dict[str, dict[int, float]] = defaultdict(dict)
    for strategy in (FedAvg, CheckedFedAvg):
        for nodes in counts:
            with new_process() as pool:
                peak = pool.submit(aggregation, strategy, nodes).result()
            peaks[strategy.__name__][nodes] = peak
    return dict(peaks)


def measure_large(megabytes: int) -> dict[str, Any]:
    """Seconds and peak memory of sending one large model to a node and back."""
    with (
        tempfile.TemporaryDirectory() as directory,
        LocalFederation(1, Path(directory)) as federation,
        peak_memory(federation) as peaks,
    ):
        settings = {"work": "negated", "megabytes": megabytes, "phases": 1, "nodes": 1}
        outcome = federation.run(ECHO_APP, {**settings, "fast": True}, timeout=900)
    seconds = re.findall(r"PHASE ([\d.]+) 1 0", "\n".join(outcome.lines))
    if not outcome.completed or not seconds:
        raise RuntimeError("the run failed:\n" + "\n".join(outcome.lines[-40:]))
    return {
        "megabytes": megabytes,
        "seconds": float(seconds[0]),
        "peak_mb": {kind: size / 1e6 for kind, size in sorted(peaks.items())},
    }


def measure_trained(megabytes: int) -> dict[str, Any]:
    """Peak memory of training one large model on two nodes by FedAvg."""
    os.environ[MEGABYTES] = str(megabytes)
    with (
        tempfile.TemporaryDirectory() as directory,
        LocalFederation(2, Path(directory)) as federation,
        peak_memory(federation) as peaks,
    ):
        settings = {
            **SETTINGS,
            "model": "benchmarks.wide_network:WideNetwork",
            "partition.test-share": 0.2,
            "partition.max-samples": 200,
            "num-rounds": 3,
            "min-nodes": 2,
            "runs-dir": f"{directory}/runs",
        }
        outcome = federation.run(APP_DIR, settings, timeout=1800)
    if not outcome.completed:
        raise RuntimeError("the run failed:\n" + "\n".join(outcome.lines[-40:]))
    return {
        "megabytes": megabytes,
        "peak_mb": {kind: size / 1e6 for kind, size in sorted(peaks.items())},
    }


def new_process() -> ProcessPoolExecutor:
    """Start an empty process, to measure its own peak memory."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def show(figures: dict[str, Any]) -> None:
    """Print tables."""
    console = Console()
    runs = Table("nodes", "rounds", "nodes/s", "process", "warm [MB]", "end [MB]", "growth")
    for part in ("virtual", "real"):
        row = figures[part]
        run = (f"{row['nodes']} {part}", str(row["rounds"]), f"{row['nodes_per_second']:.1f}")
        for name, memory in row["memory"].items():
            sizes = (f"{memory['warm_mb']:.0f}", f"{memory['end_mb']:.0f}")
            runs.add_row(*run, name, *sizes, f"{memory['growth_percent']:+.1f} %")
    console.print(runs)
    counts = next(iter(figures["aggregation"].values()))
    peaks = Table("averaging models of 8 MB", *(f"{nodes} nodes [MB]" for nodes in counts))
    for name, by_nodes in figures["aggregation"].items():
        peaks.add_row(name, *(f"{peak:.0f}" for peak in by_nodes.values()))
    console.print(peaks)
    large, trained = figures["large"], figures["trained"]
    console.print(f"{large['megabytes']} MB to a node and back: {large['seconds']:.1f} s")
    console.print(f"{trained['megabytes']} MB trained by two nodes")
    peaks = Table("peak of", "to a node and back [MB]", "trained [MB]")
    for kind in sorted(large["peak_mb"].keys() | trained["peak_mb"].keys()):
        of_kind = (figure["peak_mb"].get(kind, 0) for figure in (large, trained))
        peaks.add_row(kind, *(f"{size:.0f}" for size in of_kind))
    console.print(peaks)


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(prog="benchmarks.load", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="fewer nodes and rounds, smaller models"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the figures")
    arguments = parser.parse_args()
    rounds = 10 if arguments.quick else 50
    figures = {
        "aggregation": measure_aggregation((10, 50) if arguments.quick else (10, 50, 200)),
        "large": measure_large(100 if arguments.quick else 1000),
        "trained": measure_trained(64 if arguments.quick else 256),
        "virtual": measure_virtual(50 if arguments.quick else 200, rounds),
        "real": measure_real(4 if arguments.quick else 20, rounds),
    }
    show(figures)
    write_json(arguments.json, figures)


if __name__ == "__main__":
    main()
