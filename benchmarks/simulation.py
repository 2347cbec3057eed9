"""Client steps a second of a simulation: virtual nodes one by one, and in batches.

``python -m benchmarks.simulation [--quick] [--device cuda:0] [--case NAME ...] [--ray]
[--json FILE]``

``python -m benchmarks.simulation --peers [--quick] [--peers-dir DIR] [--json FILE]`` compares other
systems with this one in its place: `benchmarks.peers`.

Each client has 50 samples and trains one epoch with batches of 10, so 5 steps a round. LeNet has
all of 10, 50 and 100 clients train; the last row is the set-up of pfl-research's benchmark on
CIFAR-10: 1,000 clients, 50 a round, a network of two convolutions and a hidden layer (its two
dropout layers are left out: nodes with dropout cannot train together). Pixels are random.

A rate is client steps over the seconds of a round's train phase: messages, training, replies. The
minutes of pfl-research's published run are those of 1,500 whole rounds. The first round, in which
everything is loaded, is ignored. Server and nodes share one process, and the
ways take turns; ``--ray`` adds Flower's simulation runtime with one worker, also both ways.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.figures import read_lines, spread, write_json
from benchmarks.goal import Goal
from benchmarks.gpu_profile import traced
from benchmarks.in_process import Settings, run_in_process
from flwr_distill.client.app import MethodApp
from flwr_distill.client.app import app as client_app
from flwr_distill.server.app import main as server_main
from flwr_distill.task.datasets import Dataset, DataSpec, RawSamples

SAMPLES, BATCH = 50, 10
PFL = "pfl"
PFL_ROUNDS = 1500
PFL_MINUTES = 4.0
"""What pfl-research publishes for its run on one GPU."""
BASELINE = "one by one"


@dataclass(frozen=True)
class Case:
    """Clients of a federation, and how many of them train in a round."""

    name: str
    dataset: str
    model: str
    clients: int
    a_round: int


@dataclass
class Row:
    """Client steps a second of a case, of each round, by way."""

    case: Case
    rates: dict[str, list[float]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Of a whole round, likewise."""

    def ratio(self, way: str) -> float:
        """A way's median over that of training one by one in this process."""
        return statistics.median(self.rates[way]) / statistics.median(self.rates[BASELINE])


class Round(NamedTuple):
    """Client steps a second of a train phase, and seconds of its whole round."""

    rate: float
    seconds: float


Way = Callable[[Settings, int, str, Path], None]
"""Runs a federation: run config, number of clients, device, folder of runs."""


def grey_pixels(root: Path, download: bool) -> Dataset:
    """Random images of MNIST's shape, for 100 clients: a plug-in for ``dataset``."""
    return _random_pixels((1, 28, 28), 100 * SAMPLES)


def colour_pixels(root: Path, download: bool) -> Dataset:
    """Random images of CIFAR-10's shape, for 1,000 clients: a plug-in for ``dataset``."""
    return _random_pixels((3, 32, 32), 1000 * SAMPLES)


def _random_pixels(shape: tuple[int, int, int], count: int) -> Dataset:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (count, *shape), dtype=np.uint8)
    samples = RawSamples(images, rng.integers(0, 10, count))
    channels = (0.5,) * shape[0]
    return Dataset(DataSpec("random", shape, 10, channels, channels), samples, samples.subset([0]))


def pfl_cnn(spec: DataSpec) -> nn.Module:
    """3x3 convolutions (32, 64), 2x2 max pooling, a hidden layer of 128: 1.6 million weights."""
    side = (spec.shape[1] - 4) // 2
    return nn.Sequential(
        nn.Conv2d(spec.shape[0], 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * side * side, 128),
        nn.ReLU(),
        nn.Linear(128, spec.num_classes),
    )


CASES = [
    *(
        Case("LeNet", "benchmarks.simulation:grey_pixels", "hfldd-mnist", n, n)
        for n in (10, 50, 100)
    ),
    Case(PFL, "benchmarks.simulation:colour_pixels", "benchmarks.simulation:pfl_cnn", 1000, 50),
]


def in_this_process(config: Settings, clients: int, device: str, folder: Path) -> None:
    """Run server and nodes in this process."""
    node: Settings = {"num-partitions": clients, "device": device, "simulated": True}
    run_in_process(config, [node] * clients, folder)


def in_ray(config: Settings, clients: int, device: str, folder: Path) -> None:
    """Run in Flower's simulation runtime, with one worker."""
    from flwr.simulation import run_simulation

    settings = {**config, "runs-dir": str(folder), "min-nodes": clients}
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        context.run_config = settings
        server_main(grid, context)

    resources: dict[str, Any] = {"num_cpus": 1, "num_gpus": int(device != "cpu")}
    run_simulation(
        server,
        _Configured(settings, {"device": device, "state-dir": str(folder / "nodes")}),
        clients,
        backend_config={
            "client_resources": resources,
            "init_args": {"num_cpus": 1, "num_gpus": resources["num_gpus"]},
        },
    )


class _Configured(MethodApp):
    """Our ClientApp with a run config, which Flower's `run_simulation` cannot give."""

    def __init__(self, run_config: Settings, node_config: Settings) -> None:
        super().__init__()
        self.run_config, self.node_config = dict(run_config), dict(node_config)

    def __call__(self, message: Message, context: Context) -> Message:
        own = Context(
            context.run_id,
            context.node_id,
            {**context.node_config, **self.node_config},
            context.state,
            self.run_config,
        )
        return client_app(message, own)


def timed_rounds(case: Case, way: Way, together: str, device: str, rounds: int) -> list[Round]:
    """Run a federation; time each round but the first."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        split = folder / "split.json"
        samples = np.arange(case.clients * SAMPLES).reshape(-1, SAMPLES).tolist()
        split.write_text(json.dumps(dict(enumerate(samples))))
        config: dict[str, bool | int | float | str] = {
            "strategy": "fedavg",
            "num-rounds": rounds + 1,
            "fraction-train": case.a_round / case.clients,
            "dataset": case.dataset,
            "model": case.model,
            "partition.scheme": "index-file",
            "partition.index-file": str(split),
            "train.batch-size": BATCH,
            "train.local-epochs": 1,
            "train.holdout": 0.0,
            "server-device": device,
            "simulation.together": together,
        }
        way(config, case.clients, device, folder)
        (journal,) = folder.glob("*/journal.jsonl")
        phases = read_lines(journal)
        ends = [row["seconds"] for row in read_lines(journal.with_name("metrics.jsonl"))]
    trained = [phase for phase in phases if phase.get("phase") == "train"]
    if len(trained) != rounds + 1 or any(len(p["nodes"]) != case.a_round for p in trained):
        raise RuntimeError(f"{case}: not all clients trained in all rounds")
    durations = [end - start for start, end in pairwise(ends)]
    return [
        Round(sum(node["num-steps"] for node in phase["nodes"].values()) / phase["seconds"], whole)
        for phase, whole in zip(trained[1:], durations[1:], strict=True)
    ]


def measure(
    case: Case, ways: Mapping[str, tuple[Way, str]], device: str, *, rounds: int, repeats: int
) -> Row:
    """Have the ways take turns."""
    row = Row(case, {name: [] for name in ways}, {name: [] for name in ways})
    for _ in range(repeats):
        for name, (way, together) in ways.items():
            timed = timed_rounds(case, way, together, device, rounds)
            row.rates[name] += [one.rate for one in timed]
            row.seconds[name] += [one.seconds for one in timed]
            text = f"{case.name}, {case.a_round} clients a round, {name}"
            print(f"{text}: {spread(row.rates[name], 0)} steps a second", flush=True)
    return row


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Whether pfl-research's published run would take less than its published time."""
    return [
        Goal(
            f"pfl-research's set-up, {PFL_ROUNDS:,} rounds [minutes]",
            [PFL_ROUNDS * min(statistics.median(s) for s in row.seconds.values()) / 60],
            at_most=PFL_MINUTES,
        )
        for row in rows
        if row.case.name == PFL
    ]


def evidence(case: Case, way: Way, together: str, device: str) -> dict[str, Any]:
    """What a GPU did in a run: its costliest kernels, and the longest gaps between them."""
    run = partial(timed_rounds, case, way, together, device, rounds=1)
    seen = traced(run, torch.device(device))
    return {"costliest_kernels": seen.costliest(), "longest_gaps": seen.longest_gaps()}


def show(rows: Sequence[Row]) -> None:
    """Print a table."""
    ways = list(rows[0].rates)
    table = Table("network", "clients a round", *(f"{way}: median (min-max)" for way in ways))
    for row in rows:
        cells = [f"{spread(row.rates[way], 0)}, x{row.ratio(way):.2f}" for way in ways]
        table.add_row(row.case.name, f"{row.case.a_round} of {row.case.clients}", *cells)
    Console().print(table)


def as_json(rows: Sequence[Row], device: str) -> dict[str, Any]:
    """Figures as JSON."""
    return {
        "device": torch.cuda.get_device_name(device) if device != "cpu" else device,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "rows": [
            {**asdict(row), "ratios": {way: row.ratio(way) for way in row.rates}} for row in rows
        ],
        "goals": [goal.as_json() for goal in goals(rows)],
    }


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(prog="benchmarks.simulation", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="LeNet and 10 clients, few rounds")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N")
    parser.add_argument("--case", nargs="+", choices=list(dict.fromkeys(c.name for c in CASES)))
    parser.add_argument("--repeats", type=int, help="turns; default: 2, or 3 with --peers")
    parser.add_argument("--ray", action="store_true", help="Flower's simulation runtime too")
    parser.add_argument("--peers", action="store_true", help="compare with other systems, on CPUs")
    parser.add_argument(
        "--peers-dir",
        type=Path,
        default=Path.home() / ".cache" / "flwr-distill" / "peers",
        help="folder for environments of other systems; default: %(default)s",
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    if args.peers:
        if args.ray or args.case or args.device != "cpu":
            parser.error("--peers has its own cases, on CPUs: drop --ray, --case and --device")
        from benchmarks.peers.harness import compare  # here: needs psutil

        compare(args.peers_dir, quick=args.quick, repeats=args.repeats or 3, file=args.json)
        return
    ways: dict[str, tuple[Way, str]] = {
        BASELINE: (in_this_process, "off"),
        "together": (in_this_process, "on"),
    }
    if args.ray:
        ways |= {"Ray, one by one": (in_ray, "off"), "Ray, together": (in_ray, "on")}
    rounds, repeats = (2, 1) if args.quick else (3, args.repeats or 2)
    rows: list[Row] = []

    def write(**more: Any) -> None:
        if args.json is not None:
            content = as_json(rows, args.device) | more
            write_json(args.json, content)

    for case in CASES[:1] if args.quick else CASES:
        if args.case is None or case.name in args.case:
            rows.append(measure(case, ways, args.device, rounds=rounds, repeats=repeats))
            write()  # after each, to keep those before one that fails
    show(rows)
    if args.device != "cpu" and any(goal.met is False for goal in goals(rows)):
        case = next(case for case in CASES if case.name == PFL)
        write(evidence=evidence(case, in_this_process, "on", args.device))


if __name__ == "__main__":
    main()
