"""Accuracy with hostile nodes: the matrix of strategies and attacks.

``python -m benchmarks.attacks [--quick] [--strategies fedavg ...] [--attacks NaN ...]
[--hostile 1 2 3] [--seeds 0 1 2] [--rounds 15] [--defence on] [--json FILE]``

Digits, ten nodes, in this process with the real apps: mean test accuracy of the last three rounds
over the seeds, beside the same run without the hostile nodes. A run that ends with an error counts
as accuracy 0. The backdoor's success is the share of other classes' test samples that the last
model takes for the target when they carry the trigger. What nodes do is in `benchmarks.hostile`.

Samples are partitioned evenly, since rules against hostile nodes need similar ones; HFLDD, whose
heads have all classes anyway, has five classes a node.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from benchmarks.hostile import TARGET, Attack, Ring, is_possible, with_trigger
from benchmarks.in_process import Node, Settings, run_in_process
from task.datasets import load_dataset
from task.evaluation import predict
from task.models import create_model

NODES = 10
LAST_ROUNDS = 3
QUICK_ROUNDS = 5
EVENLY: Settings = {"partition.scheme": "iid"}
STRATEGIES: Mapping[str, Settings] = {
    "fedavg": EVENLY,
    "hfldd": {"partition.classes": 5, "hfldd.groups": 2},
    "fedhead": EVENLY,
    "cadis": EVENLY,
    "fedlgd": EVENLY,
}


@dataclass(frozen=True)
class Setup:
    """What a run is besides its attack: strategy, seed, rounds, and whether it is defended."""

    strategy: str
    seed: int
    rounds: int
    defence: str

    def config(self) -> Settings:
        """Run config."""
        return {
            "strategy": self.strategy,
            "seed": self.seed,
            "num-rounds": self.rounds,
            "defence": self.defence,
            **STRATEGIES[self.strategy],
        }


@dataclass(frozen=True)
class Result:
    """What comes out of a run.

    Parameters
    ----------
    accuracy : float
        On test samples, mean of the last rounds.
    set_aside : int
        Replies, models and parcels set aside in all rounds.
    backdoor_success : float
        See the module.
    """

    accuracy: float
    set_aside: int
    backdoor_success: float


def attacked(setup: Setup, attack: Attack, hostile: int) -> Result:
    """A run in which the last nodes are hostile."""
    if attack is Attack.NONE:
        return unharmed(setup, NODES)
    ring = Ring(attack, hostile / NODES)

    def wrap(place: int, node: Node) -> Node:
        return ring.hostile(node) if place >= NODES - hostile else ring.observed(node)

    return _result(setup, NODES, wrap)


@cache
def unharmed(setup: Setup, present: int) -> Result:
    """A run of the first nodes alone, all honest."""
    return _result(setup, present, lambda place, node: node)


def _result(setup: Setup, present: int, wrap: Callable[[int, Node], Node]) -> Result:
    nodes = [{"partition-id": place, "num-partitions": NODES} for place in range(present)]
    with tempfile.TemporaryDirectory() as folder:
        try:
            rows = run_in_process(setup.config(), nodes, Path(folder), wrap)
        except Exception as error:
            Console(stderr=True).print(f"{setup}: {error}", markup=False)
            return Result(0.0, 0, 0.0)
        return Result(
            accuracy=statistics.mean(float(row["accuracy"]) for row in rows[-LAST_ROUNDS:]),
            set_aside=sum(row["set_aside"] for row in rows),
            backdoor_success=backdoor_success(Path(folder) / "1" / "model.safetensors"),
        )


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


def cell(setups: list[Setup], attack: Attack, hostile: int) -> Cell:
    """Run with the hostile nodes, and without them."""
    runs = [attacked(setup, attack, hostile) for setup in setups]
    absent = [unharmed(setup, NODES - hostile) for setup in setups]
    return Cell(
        strategy=setups[0].strategy,
        attack=attack,
        hostile=hostile,
        accuracy=statistics.mean(run.accuracy for run in runs),
        absent_accuracy=statistics.mean(run.accuracy for run in absent),
        set_aside=statistics.mean(run.set_aside for run in runs),
        backdoor_success=statistics.mean(run.backdoor_success for run in runs),
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
    parser.add_argument("--defence", choices=("on", "off"), default="on")
    parser.add_argument("--quick", action="store_true", help=f"seed 0, {QUICK_ROUNDS} rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the cells there")
    arguments = parser.parse_args()
    seeds = [0] if arguments.quick else arguments.seeds
    rounds = QUICK_ROUNDS if arguments.quick else arguments.rounds

    console = Console()
    columns = ("strategy", "attack", "hostile", "accuracy", "absent", "lost", "set aside")
    table = Table(*columns, "backdoor")
    cells = []
    for strategy in arguments.strategies:
        setups = [Setup(strategy, seed, rounds, arguments.defence) for seed in seeds]
        for attack in arguments.attacks:
            if not is_possible(attack, strategy):
                continue
            for hostile in arguments.hostile:
                one = cell(setups, attack, hostile)
                cells.append(asdict(one))
                row = (
                    strategy,
                    attack,
                    str(hostile),
                    f"{one.accuracy:.3f}",
                    f"{one.absent_accuracy:.3f}",
                    f"{100 * (one.absent_accuracy - one.accuracy):+.1f}",
                    f"{one.set_aside:.0f}",
                    f"{one.backdoor_success:.2f}",
                )
                table.add_row(*row)
                console.print(*row)
    console.print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"cells": cells}, indent=2) + "\n")


if __name__ == "__main__":
    main()
