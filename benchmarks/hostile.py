"""Accuracy with two of ten nodes that send NaN, updates 1,000 times too long, or reversed ones.

``python -m benchmarks.hostile [--strategies fedavg ...] [--attacks NaN ...] [--seeds 0 1 2]
[--rounds 15] [--json FILE]``

Digits, in this process with the real apps; compared with the two nodes honest and with them absent:
mean test accuracy of the last three rounds over the seeds.

Screening handles NaN and length, on nodes with five classes each. Reversed updates have an honest
length: against them, ``fedavg`` is Flower's Multi-Krum, which FedLGD aggregates with too; HFLDD,
whose five heads are too few for it, uses the median; FedHEAD and CADIS have no aggregator.
Aggregators need similar nodes, so samples are then partitioned evenly, except for HFLDD, whose
heads have all classes.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from flwr.app import Message, RecordDict
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.in_process import Node, Settings, run_in_process
from client.training import Trained, train_round

NODES = 10
HOSTILE = (3, 8)
HONEST = tuple(place for place in range(NODES) if place not in HOSTILE)
LAST_ROUNDS = 3
FIVE_CLASSES: Settings = {"partition.classes": 5}
EVENLY: Settings = {"partition.scheme": "iid"}
STRATEGIES: Mapping[str, Settings] = {
    "fedavg": FIVE_CLASSES,
    "hfldd": {**FIVE_CLASSES, "hfldd.groups": 2},
    "fedhead": FIVE_CLASSES,
    "cadis": FIVE_CLASSES,
    "fedlgd": FIVE_CLASSES,
}
KRUM = json.dumps({"num_malicious_nodes": 2, "num_nodes_to_select": 8})
AGAINST_TURNED: Mapping[str, Settings] = {
    "fedavg": {**EVENLY, "strategy": "multikrum", "strategy-args": KRUM},
    "hfldd": {**FIVE_CLASSES, "hfldd.groups": 2, "aggregator": "fedmedian"},
    "fedhead": EVENLY,
    "cadis": EVENLY,
    "fedlgd": {**EVENLY, "aggregator": "multikrum", "aggregator-args": KRUM},
}
ATTACKS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "NaN": lambda start, trained: trained * torch.nan,
    "x 1000": lambda start, trained: start + 1000 * (trained - start),
    "turned": lambda start, trained: start - (trained - start),
}
"""A hostile node's model, from the model before and after training."""


def hostile(node: Node, attack: str) -> Node:
    """A node that corrupts each model after training."""

    def spoiled(model: nn.Module, *args: Any, **kwargs: Any) -> Trained:
        start = {name: value.clone() for name, value in model.state_dict().items()}
        trained = train_round(model, *args, **kwargs)
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                value.copy_(ATTACKS[attack](start[name], value))
        return trained

    def answer(message: Message) -> RecordDict | None:
        with patch("client.local_round.train_round", spoiled):
            return node(message)

    return answer


def last_accuracy(run_config: Settings, places: Sequence[int], attack: str = "") -> float:
    """Mean accuracy of the last rounds with these partitions; no attack means all are honest."""
    nodes = [{"partition-id": place, "num-partitions": NODES} for place in places]

    def wrap(index: int, node: Node) -> Node:
        return hostile(node, attack) if attack and places[index] in HOSTILE else node

    rows = run_in_process(run_config, nodes, wrap=wrap)
    return statistics.mean(float(row["accuracy"]) for row in rows[-LAST_ROUNDS:])


def main() -> None:
    """Run all attacks, print the table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=ATTACKS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    arguments = parser.parse_args()

    console = Console()
    table = Table("strategy", "attack", "two hostile", "two absent", "all honest", "lost to absent")
    rows = []
    for strategy in arguments.strategies:
        for attacks, settings in (
            (("NaN", "x 1000"), STRATEGIES[strategy]),
            (("turned",), AGAINST_TURNED[strategy]),
        ):
            chosen = [attack for attack in attacks if attack in arguments.attacks]
            accuracies: dict[str, list[float]] = {
                name: [] for name in (*chosen, "absent", "honest")
            }
            for seed in arguments.seeds if chosen else ():
                run_config = {
                    "strategy": strategy,
                    "num-rounds": arguments.rounds,
                    "seed": seed,
                    **settings,
                }
                for attack in chosen:
                    accuracies[attack].append(last_accuracy(run_config, range(NODES), attack))
                accuracies["absent"].append(last_accuracy(run_config, HONEST))
                accuracies["honest"].append(last_accuracy(run_config, range(NODES)))
            for attack in chosen:
                runs = [accuracies[attack], accuracies["absent"], accuracies["honest"]]
                means = [statistics.mean(run) for run in runs]
                cells = [f"{mean:.3f}" for mean in means]
                table.add_row(strategy, attack, *cells, f"{100 * (means[1] - means[0]):+.1f}")
                console.print(strategy, attack, *cells)
                columns = dict(zip(("hostile", "absent", "honest"), runs, strict=True))
                rows.append({"strategy": strategy, "attack": attack, **columns})
    console.print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
