"""Federations on digits with random changes of training images, and without.

``python -m benchmarks.augmentation [--strategy hfldd] [--nodes 10] [--classes 2] [--rounds 10]
[--seeds 0 1 2] [--json FILE]``

Test accuracy after the last round, in this process with the real apps. Changes of a round go to the
nodes with its train messages: "auto late" begins in the fourth round. The learning rate is the
default, 0.05, or 0.1, and with "cosine" falls from 0.1 over the rounds (``train.lr-schedule``).
"""

import argparse
import shutil
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Message, RecordDict
from rich.console import Console
from rich.table import Table

from benchmarks.figures import write_json
from benchmarks.in_process import Settings, run_in_process
from flwr_distill.protocol.messages import CONFIG, SERVER_ROUND
from flwr_distill.simulation.grid import Node

LATE = 4
TRAINING = ("train", "train.pool", "train.virtual")
"""Types of the messages that have a node train."""


@dataclass(frozen=True)
class Variant:
    """Settings of local training by round.

    Parameters
    ----------
    augment : callable
        ``train.augment``, by the round.
    settings : Mapping[str, bool | int | float | str] (default: {})
        Of the run.
    """

    augment: Callable[[int], str]
    settings: Settings = field(default_factory=dict)


def _none(server_round: int) -> str:
    return "none"


def _auto(server_round: int) -> str:
    return "auto"


def _late(server_round: int) -> str:
    return "auto" if server_round >= LATE else "none"


DOUBLE: Settings = {"train.lr": 0.1}
COSINE: Settings = {**DOUBLE, "train.lr-schedule": "cosine"}

VARIANTS = {
    "none": Variant(_none),
    "auto": Variant(_auto),
    "auto late": Variant(_late),
    "none, lr 0.1": Variant(_none, DOUBLE),
    "auto, lr 0.1": Variant(_auto, DOUBLE),
    "none, cosine": Variant(_none, COSINE),
    "auto, cosine": Variant(_auto, COSINE),
    "auto late, cosine": Variant(_late, COSINE),
}


def accuracies(
    variant: Variant, arguments: argparse.Namespace, seed: int, folder: Path
) -> list[float]:
    """Accuracy by round; nodes use the virtual data that they have in `folder`."""

    def told(place: int, node: Node) -> Node:
        def answer(message: Message) -> RecordDict | None:
            if message.metadata.message_type in TRAINING:
                config: Any = message.content.config_records[CONFIG]
                config["augment"] = variant.augment(int(config[SERVER_ROUND]))
            return node(message)

        return answer

    run_config = {
        "strategy": arguments.strategy,
        "dataset": "digits",
        "partition.classes": arguments.classes,
        "num-rounds": arguments.rounds,
        "seed": seed,
        **variant.settings,
    }
    nodes = [{"num-partitions": arguments.nodes}] * arguments.nodes
    rows = run_in_process(run_config, nodes, folder, wrap=told)
    return [row["accuracy"] for row in rows]


def main() -> None:
    """Run all variants, print the table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="hfldd")
    parser.add_argument("--nodes", type=int, default=10)
    parser.add_argument("--classes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    arguments = parser.parse_args()

    console = Console()
    results: dict[str, list[list[float]]] = {name: [] for name in arguments.variants}
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as temporary:
            first = Path(temporary) / arguments.variants[0]
            for name, runs in results.items():
                folder = Path(temporary) / name
                if folder != first and arguments.strategy == "hfldd":  # its virtual data stay
                    shutil.copytree(first / "nodes", folder / "nodes")
                runs.append(accuracies(VARIANTS[name], arguments, seed, folder))
                console.print(f"{name}, seed {seed}: {runs[-1][-1]:.3f}")
    table = Table("train.augment", *(f"seed {seed}" for seed in arguments.seeds), "mean")
    for name, runs in results.items():
        last = [run[-1] for run in runs]
        table.add_row(name, *(f"{value:.3f}" for value in (*last, statistics.mean(last))))
    console.print(table)
    write_json(arguments.json, results)


if __name__ == "__main__":
    main()
