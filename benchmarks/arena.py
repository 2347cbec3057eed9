"""Every strategy with every skew, on one footing.

``python -m benchmarks.arena [--quick] [--data digits] [--data-root DIR] [--strategies fedavg ...]
[--skews "one class" ...] [--seeds 0 1 2] [--rounds 20] [--jobs 2] [--out DIR] [--json FILE]``

Ten nodes with the same model, start, optimiser and local epochs; a run in one process, with the
real apps. Settings are the defaults but for two: FedProx's mu, by default 0, is 0.1, and DynaFed
distils after 10 rounds, by default 25. "hfldd-all" is HFLDD where all nodes train. FedProto and
FedMD have no global model. "half" has the nodes of "Dirichlet 0.1", of which half train in each
round. The nodes of "domains" have digits as they are, negatives, and digits on a bright gradient,
of all classes.

Accuracies are of the global model on test samples, the mean of three rounds (a single round of a
skewed run swings by several points). A node's own accuracy is that of its model, or of the global
one, on samples that it holds out, the mean of the last five rounds: the tables have the mean of all
nodes and the worst. A node's seconds are those in which it answers messages. Bytes are without
those of this evaluation.

``--out`` keeps a line for each finished run in ``runs.jsonl``; what is there is not run again, so
an interrupted arena continues. It also gets the tables (``arena.html``, ``arena.md``) and the heat
map (``arena.png``). Where nothing else is given, ``--quick`` is seed 0, ten rounds, five skews and
seven strategies.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message, RecordDict
from rich.console import Console
from rich.progress import track

from benchmarks import domains
from benchmarks.arena_tables import GOAL, Cell, print_tables, write_tables
from benchmarks.figures import read_lines, write_json
from benchmarks.in_process import Settings, run_in_process
from flwr_distill.simulation.grid import Node

NODES = 10
ROUNDS = 20
QUICK_ROUNDS = 10
AFTER = (5, 10, 20)
LAST = 5
"""Rounds of which a node's accuracy is the mean."""
STRATEGIES: Mapping[str, Settings] = {
    "fedavg": {},
    "fedprox": {"train.proximal-mu": 0.1},
    "fedavgm": {},
    "fednova": {},
    "feddyn": {},
    "scaffold": {},
    "moon": {},
    "fedfa": {},
    "feddf": {},
    "vhl": {},
    "feddm": {},
    "fedaf": {},
    "fedseq": {},
    "fedseq-zaccone": {},
    "dynafed": {"dynafed.trajectory": 10},
    "fedhkd": {},
    "fedproto": {},
    "fedmd": {},
    "fedhead": {},
    "fedhead-plus": {},
    "cadis": {},
    "hfldd": {},
    "hfldd-all": {"strategy": "hfldd", "hfldd.heads": "all"},
    "fedlgd": {},
    "auto": {},
}
SKEWS: Mapping[str, Settings] = {
    "IID": {"partition.scheme": "iid"},
    "Dirichlet 1": {"partition.scheme": "dirichlet", "partition.alpha": 1.0},
    "Dirichlet 0.1": {"partition.scheme": "dirichlet", "partition.alpha": 0.1},
    "Dirichlet 0.01": {"partition.scheme": "dirichlet", "partition.alpha": 0.01},
    "two classes": {"partition.classes": 2},
    "one class": {"partition.classes": 1},
    "cluster MC": {"partition.scheme": "cluster-mc"},
    "cluster BC": {"partition.scheme": "cluster-bc"},
    "cluster UC": {"partition.scheme": "cluster-uc"},
    "Pareto": {"partition.scheme": "pareto"},
    "domains": {"dataset": "benchmarks.domains:digits", "partition.scheme": "index-file"},
    "half": {
        "partition.scheme": "dirichlet",
        "partition.alpha": 0.1,
        "fraction-train": 0.5,
    },
}
QUICK_STRATEGIES = ("fedavg", "scaffold", "fedhead", "cadis", "hfldd", "fedlgd", "auto")
QUICK_SKEWS = ("IID", "Dirichlet 0.1", "two classes", "one class", "cluster BC")
DATA: Mapping[str, Settings] = {
    "digits": {"dataset": "digits"},
    "mnist": {"dataset": "benchmarks.domains:mnist"},
    "cifar10": {"dataset": "cifar10", "model": "digits-cnn"},
}
"""MNIST is cut to 3,000 images. The small network is for the CPU: ConvNet-3 takes more than half an
hour a run on all images of CIFAR-10 that are in the data root."""


@dataclass(frozen=True)
class Run:
    """A run of the arena, and what names it in ``runs.jsonl``."""

    strategy: str
    skew: str
    seed: int
    rounds: int
    data: str


@dataclass(frozen=True)
class Result:
    """What comes out of a run.

    Parameters
    ----------
    accuracies : list[float]
        On test samples, before the first round and after each; empty if there is no global model.
    server_bytes, link_bytes : int
        Of the whole run, without those of evaluation on nodes.
    node_seconds : float
        In which a node answered messages; mean of the nodes.
    mean_node, worst_node : float
        Mean and lowest of the nodes' accuracies on what they hold out.
    """

    accuracies: list[float]
    server_bytes: int
    link_bytes: int
    node_seconds: float
    mean_node: float
    worst_node: float


def play(run: Run, data_root: str) -> Result:
    """Run a federation in this process."""
    seconds = [0.0] * NODES

    def timed(place: int, node: Node) -> Node:
        def answer(message: Message) -> RecordDict | None:
            start = time.perf_counter()
            try:
                return node(message)
            finally:
                seconds[place] += time.perf_counter() - start

        return answer

    nodes = [{"partition-id": place, "num-partitions": NODES} for place in range(NODES)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        index_file = folder / "domains.json"
        index_file.write_text(json.dumps(_indices_of_domains()))
        config = {
            **DATA[run.data],
            **SKEWS[run.skew],
            "strategy": run.strategy,
            **STRATEGIES[run.strategy],
            "seed": run.seed,
            "num-rounds": run.rounds,
            "fraction-evaluate": 1.0,
            "data-root": data_root,
            "partition.index-file": str(index_file),
        }
        rows = run_in_process(config, nodes, folder, timed)
        traffic = json.loads((folder / "1" / "traffic.json").read_text())["measured"]
        of_nodes = _accuracies_of_nodes(read_lines(folder / "1" / "journal.jsonl"))
    return Result(
        accuracies=[float(row["accuracy"]) for row in rows if row["accuracy"] is not None],
        server_bytes=rows[-1]["server_bytes"]
        - sum(sum(links.values()) for phase, links in traffic.items() if _evaluates(phase)),
        link_bytes=rows[-1]["link_bytes"],
        node_seconds=statistics.mean(seconds),
        mean_node=statistics.mean(of_nodes),
        worst_node=min(of_nodes),
    )


def _indices_of_domains() -> dict[str, list[int]]:
    """Samples of each node: node i has a share of domain ``i % 3``."""
    num_samples = len(domains.digits(Path(), download=False).train)
    return {
        str(node): list(range(domain, num_samples, 3)[place :: len(range(domain, NODES, 3))])
        for domain in range(3)
        for place, node in enumerate(range(domain, NODES, 3))
    }


def _evaluates(phase: str) -> bool:
    return phase.partition(".")[0] == "evaluate"


def _accuracies_of_nodes(journal: Iterable[Mapping[str, Any]]) -> list[float]:
    """Mean of the last rounds for each node; nodes with one sample hold none out."""
    phases = [entry["nodes"] for entry in journal if _evaluates(entry.get("phase", ""))][-LAST:]
    accuracies: defaultdict[str, list[float]] = defaultdict(list)
    for phase in phases:
        for node, numbers in phase.items():
            accuracies[node].append(numbers["eval-accuracy"])
    return [statistics.mean(each) for each in accuracies.values()]


def play_all(
    runs: Sequence[Run], data_root: str, jobs: int, kept: Path | None
) -> dict[Run, Result]:
    """Results of all runs that end well, so many at a time in processes of one thread.

    With the file `kept`, results that are there are taken from it, and others are added to it.
    """
    results = dict(_read(kept)) if kept is not None and kept.exists() else {}
    with ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        running = {pool.submit(play, run, data_root): run for run in runs if run not in results}
        for done in track(as_completed(running), "runs", total=len(running)):
            run = running[done]
            try:
                results[run] = done.result()
            except Exception as error:
                Console(stderr=True).print(f"{run}: {error}", markup=False)
                continue
            if kept is not None:
                line = json.dumps({"run": asdict(run), "result": asdict(results[run])})
                with kept.open("a") as file:
                    file.write(line + "\n")
    return {run: results[run] for run in runs if run in results}


def _read(kept: Path) -> Iterator[tuple[Run, Result]]:
    """Runs of a file with their results; the last line of an interrupted arena may be cut."""
    for line in kept.read_text().splitlines():
        with suppress(json.JSONDecodeError):
            entry = json.loads(line)
            yield Run(**entry["run"]), Result(**entry["result"])


def cells(results: Mapping[Run, Result]) -> list[Cell]:
    """A cell for each strategy with each skew: means over the seeds."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for run, result in results.items():
        groups.setdefault((run.strategy, run.skew), []).append(result)
    return [_cell(*place, group) for place, group in groups.items()]


def _cell(strategy: str, skew: str, results: list[Result]) -> Cell:
    curve = [
        statistics.mean(values) for values in zip(*(r.accuracies for r in results), strict=True)
    ]
    after = {r: statistics.mean(curve[r - 2 : r + 1]) for r in AFTER if r < len(curve)}
    reached = [r for r, accuracy in enumerate(curve) if accuracy >= GOAL]
    return Cell(
        strategy=strategy,
        skew=skew,
        accuracy=statistics.mean(curve[-3:]) if curve else None,
        after=after,
        rounds_to_goal=reached[0] if reached else None,
        server_bytes=statistics.mean(r.server_bytes for r in results),
        link_bytes=statistics.mean(r.link_bytes for r in results),
        node_seconds=statistics.mean(r.node_seconds for r in results),
        mean_node=statistics.mean(r.mean_node for r in results),
        worst_node=statistics.mean(r.worst_node for r in results),
        seeds=len(results),
    )


def main() -> None:
    """Fill the arena, print its tables and write its files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", choices=DATA, default="digits")
    parser.add_argument("--data-root", default="", help="folder of MNIST or CIFAR-10")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES)
    parser.add_argument("--skews", nargs="+", choices=SKEWS)
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="keep runs, tables and heat map there"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the cells there")
    quick = (
        f"seed 0, {QUICK_ROUNDS} rounds, {', '.join(QUICK_SKEWS)}; {', '.join(QUICK_STRATEGIES)}"
    )
    parser.add_argument("--quick", action="store_true", help=quick)
    arguments = parser.parse_args()
    strategies, skews, seeds, rounds = (
        (QUICK_STRATEGIES, QUICK_SKEWS, [0], QUICK_ROUNDS)
        if arguments.quick
        else (STRATEGIES, SKEWS, [0, 1, 2], ROUNDS)
    )
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)

    runs = [
        Run(strategy, skew, seed, arguments.rounds or rounds, arguments.data)
        for seed in arguments.seeds or seeds
        for skew in arguments.skews or skews
        for strategy in arguments.strategies or strategies
        if arguments.data == "digits" or skew != "domains"
    ]
    kept = arguments.out and arguments.out / "runs.jsonl"
    filled = cells(play_all(runs, arguments.data_root, arguments.jobs, kept))
    print_tables(filled)
    if arguments.out is not None:
        write_tables(filled, arguments.out)
    write_json(arguments.json, {"cells": [cell.as_json() for cell in filled]})


if __name__ == "__main__":
    main()
