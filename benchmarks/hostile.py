"""What two of ten nodes cost that send NaN, or updates 1,000 times too long, or turned round.

Usage: ``python -m benchmarks.hostile [--strategies fedavg ...] [--attacks NaN ...] [--seeds 0 1 2]
[--rounds 15] [--json FILE]``. Digits on ten nodes, two of which spoil every model that they have
trained; beside it the run in which they are honest, and the one in which they are not there. All in
this process, with the real apps.

NaN and length are left to the screening, on nodes that hold five classes each. A turned update is
as long as an honest one: against it, ``fedavg`` is Flower's Multi-Krum, which is FedLGD's
aggregator too; HFLDD, with five heads too few for it, takes the median; FedHEAD and CADIS, which
take no aggregator, stand as they are. Aggregators need nodes that are alike: samples are then dealt
out evenly, but for HFLDD, all of whose heads hold all classes anyway. The table gives the mean test
accuracy of the last three rounds, over the seeds.
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
"""What a hostile node makes of a model, given it before and after its training."""


def hostile(node: Node, attack: str) -> Node:
    """Have a node spoil each model that it has trained, for the server or for its leader."""

    def spoiled(model: nn.Module, *args: Any, **kwargs: Any) -> Trained:
        start = {name: value.clone() for name, value in model.state_dict().items()}
        trained = train_round(model, *args, **kwargs)
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                value.copy_(ATTACKS[attack](start[name], value))
        return trained

    def answer(message: Message) -> RecordDict | None:
        with patch("client.app.train_round", spoiled):
            return node(message)

    return answer


def last_accuracy(run_config: Settings, places: Sequence[int], attack: str = "") -> float:
    """Mean accuracy of a run's last rounds.

    Parameters
    ----------
    run_config : Mapping[str, bool | int | float | str]
        Flat, as ``-c`` takes it.
    places : sequence of int
        Partitions whose nodes are there.
    attack : str (default: "")
        What hostile nodes do; if empty, they are honest.
    """
    nodes = [{"partition-id": place, "num-partitions": NODES} for place in places]

    def wrap(index: int, node: Node) -> Node:
        return hostile(node, attack) if attack and places[index] in HOSTILE else node

    rows = run_in_process(run_config, nodes, wrap=wrap)
    return statistics.mean(float(row["accuracy"]) for row in rows[-LAST_ROUNDS:])


def main() -> None:
    """Run all attacks, print the table and, where asked, write it as JSON."""
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
            asked = [attack for attack in attacks if attack in arguments.attacks]
            found: dict[str, list[float]] = {name: [] for name in (*asked, "absent", "honest")}
            for seed in arguments.seeds if asked else ():
                run_config = {
                    "strategy": strategy,
                    "num-rounds": arguments.rounds,
                    "seed": seed,
                    **settings,
                }
                for attack in asked:
                    found[attack].append(last_accuracy(run_config, range(NODES), attack))
                found["absent"].append(last_accuracy(run_config, HONEST))
                found["honest"].append(last_accuracy(run_config, range(NODES)))
            for attack in asked:
                runs = [found[attack], found["absent"], found["honest"]]
                means = [statistics.mean(run) for run in runs]
                cells = [f"{mean:.3f}" for mean in means]
                table.add_row(strategy, attack, *cells, f"{100 * (means[1] - means[0]):+.1f}")
                console.print(strategy, attack, *cells)
                accuracies = dict(zip(("hostile", "absent", "honest"), runs, strict=True))
                rows.append({"strategy": strategy, "attack": attack, **accuracies})
    console.print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
