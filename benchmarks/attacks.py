"""Accuracy with hostile nodes: the matrix of strategies and attacks.

``python -m benchmarks.attacks [--quick] [--strategies fedavg ...] [--attacks NaN ...]
[--hostile 1 2 3] [--seeds 0 1 2] [--rounds 15] [--momentum 0.9] [--defence on] [--jobs 2]
[--json FILE]``

Digits, ten nodes, with the real apps, a run in one process: mean test accuracy of the last three
rounds over the seeds, beside the same run without the hostile nodes. A run that ends with an error
counts as accuracy 0. The backdoor's success is the share of other classes' test samples that the
last model takes for the target when they carry the trigger. What nodes do is in
`benchmarks.hostile`.

Samples are partitioned evenly, since rules against hostile nodes need similar ones; HFLDD, whose
heads have all classes anyway, has five classes a node.

``--quick`` is seed 0 and five rounds with a momentum of 0.9, with which eight honest nodes are at
90 % (FedAvg). Without, they are at about 60 % after five rounds, where one round is as likely ten
points worse than the one before as better, and no cell can be read. FedLGD, which trains on few
virtual images, never has momentum: with it eight honest nodes are at 72 %.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors.torch import load_file

from benchmarks.figures import write_json
from benchmarks.hostile import TARGET, Attack, Ring, is_possible, with_trigger
from benchmarks.in_process import Settings, run_in_process
from benchmarks.remembering import distilling_once
from flwr_distill.simulation.grid import Node
from flwr_distill.task.datasets import load_dataset
from flwr_distill.task.evaluation import predict
from flwr_distill.task.models import create_model

NODES = 10
LAST_ROUNDS = 3
QUICK_ROUNDS = 5
QUICK_MOMENTUM = 0.9
EVENLY: Settings = {"partition.scheme": "iid"}
STRATEGIES: Mapping[str, Settings] = {
    "fedavg": EVENLY,
    "hfldd": {"partition.classes": 5, "hfldd.groups": 2},
    "fedhead": EVENLY,
    "cadis": EVENLY,
    "fedlgd": {**EVENLY, "train.momentum": 0.0},
}


@dataclass(frozen=True)
class Run:
    """A run of the first nodes of ten, of which the last few are hostile.

    Parameters
    ----------
    strategy, seed, rounds, momentum, defence
        As in the run config.
    attack : Attack (default: Attack.NONE)
        What the hostile nodes do.
    hostile : int (default: 0)
        How many are hostile.
    present : int (default: 10)
        How many take part.
    """

    strategy: str
    seed: int
    rounds: int
    momentum: float
    defence: str
    attack: Attack = Attack.NONE
    hostile: int = 0
    present: int = NODES

    def config(self) -> Settings:
        """Run config."""
        return {
            "strategy": self.strategy,
            "seed": self.seed,
            "num-rounds": self.rounds,
            "train.momentum": self.momentum,
            "defence": self.defence,
            **STRATEGIES[self.strategy],
        }

    def attacked(self, attack: Attack, hostile: int) -> "Run":
        """The same run with hostile nodes."""
        return self if attack is Attack.NONE else replace(self, attack=attack, hostile=hostile)

    def without(self, absent: int) -> "Run":
        """The same run without its last nodes."""
        return replace(self, present=self.present - absent)


@dataclass(frozen=True)
class Result:
    """What comes out of a run.

    Parameters
    ----------
    accuracy : float
        On test samples, mean of the last rounds.
    set_aside : int
        Replies, models and parcels rejected in all rounds.
    backdoor_success : float
        See the module.
    """

    accuracy: float
    set_aside: int
    backdoor_success: float


def play(run: Run) -> Result:
    """Run a federation in this process."""
    ring = Ring(run.attack, run.hostile / NODES)

    def wrap(place: int, node: Node) -> Node:
        return ring.hostile(node) if place >= run.present - run.hostile else ring.observed(node)

    nodes = [{"partition-id": place, "num-partitions": NODES} for place in range(run.present)]
    with tempfile.TemporaryDirectory() as folder, distilling_once():
        try:
            rows = run_in_process(run.config(), nodes, Path(folder), wrap)
        except Exception as error:
            Console(stderr=True).print(f"{run}: {error}", markup=False)
            return Result(0.0, 0, 0.0)
        return Result(
            accuracy=statistics.mean(float(row["accuracy"]) for row in rows[-LAST_ROUNDS:]),
            set_aside=sum(row["set_aside"] for row in rows),
            backdoor_success=backdoor_success(Path(folder) / "1" / "model.safetensors"),
        )


def play_all(runs: Iterable[Run], jobs: int) -> dict[Run, Result]:
    """Results of all runs, each played once, so many at a time in processes of one thread."""
    results = {}
    with ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        running = {pool.submit(play, run): run for run in dict.fromkeys(runs)}
        for done in track(as_completed(running), "runs", total=len(running)):
            results[running[done]] = done.result()
    return results


def backdoor_success(file: Path) -> float:
    """Share of test samples with the trigger that a model takes for the target's."""
    digits = load_dataset("digits")
    model = create_model("auto", digits.spec)
    model.load_state_dict(load_file(file))
    test = digits.test.to_samples(digits.spec)
    others = test.subset((test.labels != TARGET).nonzero().flatten())
    predicted, _ = predict(model, replace(others, inputs=with_trigger(others.inputs)))
    return float((predicted == TARGET).double().mean())


@dataclass(frozen=True)
class Cell:
    """An entry of the matrix: means over the seeds."""

    strategy: str
    attack: str
    hostile: int
    accuracy: float
    absent_accuracy: float
    set_aside: float
    backdoor_success: float

    @classmethod
    def of(
        cls, strategy: str, attack: Attack, hostile: int, runs: list[Result], absent: list[Result]
    ) -> "Cell":
        """Means of runs with the hostile nodes, and of those without them."""
        return cls(
            strategy=strategy,
            attack=attack,
            hostile=hostile,
            accuracy=statistics.mean(run.accuracy for run in runs),
            absent_accuracy=statistics.mean(run.accuracy for run in absent),
            set_aside=statistics.mean(run.set_aside for run in runs),
            backdoor_success=statistics.mean(run.backdoor_success for run in runs),
        )

    def row(self) -> tuple[str, ...]:
        """The table's row."""
        return (
            self.strategy,
            self.attack,
            str(self.hostile),
            f"{self.accuracy:.3f}",
            f"{self.absent_accuracy:.3f}",
            f"{100 * (self.absent_accuracy - self.accuracy):+.1f}",
            f"{self.set_aside:.0f}",
            f"{self.backdoor_success:.2f}",
        )


def main() -> None:
    """Fill the matrix, print it and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument(
        "--attacks", nargs="+", type=Attack, default=list(Attack), choices=list(Attack)
    )
    parser.add_argument("--hostile", type=int, nargs="+", default=[2], help="how many of ten")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--momentum", type=float, default=0.0, help="of local training")
    parser.add_argument("--defence", choices=("on", "off"), default="on")
    quick = f"seed 0, {QUICK_ROUNDS} rounds, momentum {QUICK_MOMENTUM}"
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the cells there")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds, arguments.rounds, arguments.momentum = [0], QUICK_ROUNDS, QUICK_MOMENTUM
    shared = arguments.rounds, arguments.momentum, arguments.defence

    places = [
        (strategy, attack, hostile)
        for strategy in arguments.strategies
        for attack in arguments.attacks
        for hostile in arguments.hostile
        if is_possible(attack, strategy)
    ]
    pairs = {
        place: [
            (honest.attacked(*place[1:]), honest.without(place[2]))
            for honest in (Run(place[0], seed, *shared) for seed in arguments.seeds)
        ]
        for place in places
    }
    runs = [run for of_cell in pairs.values() for pair in of_cell for run in pair]
    results = play_all(runs, arguments.jobs)

    columns = ("strategy", "attack", "hostile", "accuracy", "absent", "lost", "rejected")
    table = Table(*columns, "backdoor")
    cells = []
    for place, pair in pairs.items():
        attacked, absent = zip(*pair, strict=True)
        cells.append(Cell.of(*place, [results[r] for r in attacked], [results[r] for r in absent]))
        table.add_row(*cells[-1].row())
    Console().print(table)
    write_json(arguments.json, {"cells": [asdict(cell) for cell in cells]})


if __name__ == "__main__":
    main()
