"""CADIS and its two halves against FedAvg, on nodes in unequal clusters.

``python -m benchmarks.cadis [--seeds 0 1 2] [--rounds 40] [--fractions 1.0 0.3] [--methods FedAvg
CADIS] [--model mlp] [--preset FILE --data-root DIR] [--json FILE]``

Twenty nodes in clusters of 12, 5 and 3 have the digits 0-3, 4-6 and 7-9, equally many samples each;
SGD, lr 0.01, batches of 8, 5 local epochs.
``--preset flwr_distill/presets/cadis-mnist.toml --fractions 0.1`` is the paper's setting on
MNIST. Mean test accuracy of the last ten rounds; in this process, with the real apps.
"""

import argparse
import statistics
import tomllib
from pathlib import Path

from flwr.common.config import flatten_dict
from rich.console import Console
from rich.table import Table

from benchmarks.figures import write_json
from benchmarks.in_process import Settings, run_in_process

LAST_ROUNDS = 10
SETTING: Settings = {
    "min-nodes": 20,
    "partition.scheme": "cluster-mc",
    "partition.clusters": "12:5:3",
    "train.lr": 0.01,
    "train.batch-size": 8,
    "train.local-epochs": 5,
    "train.holdout": 0.0,
    "cadis.main-cluster": 0.0,  # the paper's
    "cadis.most-say": 20.0,
}
METHODS: dict[str, Settings] = {
    "FedAvg": {"strategy": "fedavg"},
    "CADIS": {"strategy": "cadis"},
    "aggregation alone": {"strategy": "cadis", "cadis.kd-lambda": 0.0},
    "regulariser alone": {"strategy": "cadis", "cadis.aggregation": "samples"},
}


def accuracy_by_round(run_config: Settings) -> list[float]:
    """Test accuracy of the initial model and after each round."""
    nodes = int(run_config["min-nodes"])
    rows = run_in_process(run_config, [{"num-partitions": nodes}] * nodes)
    return [float(row["accuracy"]) for row in rows]


def main() -> None:
    """Run the methods, print the table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--fractions", type=float, nargs="+", default=[1.0, 0.3])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--model", default="mlp", help="for digits; a preset has its own")
    parser.add_argument("--preset", type=Path, metavar="FILE", help="instead of digits")
    parser.add_argument("--data-root", default="")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    arguments = parser.parse_args()

    setting = {**SETTING, "model": arguments.model}
    if arguments.preset is not None:
        setting = flatten_dict(tomllib.loads(arguments.preset.read_text()))
    console = Console()
    table = Table("nodes per round", "method", "each seed", "mean", "over FedAvg")
    rows = []
    for fraction in arguments.fractions:
        fedavg = 0.0
        for method in arguments.methods:
            runs = [
                accuracy_by_round(
                    {
                        **setting,
                        **METHODS[method],
                        "data-root": arguments.data_root,
                        "seed": seed,
                        "num-rounds": arguments.rounds,
                        "fraction-train": fraction,
                    }
                )
                for seed in arguments.seeds
            ]
            accuracies = [statistics.mean(run[-LAST_ROUNDS:]) for run in runs]
            mean = statistics.mean(accuracies)
            fedavg = mean if method == "FedAvg" else fedavg
            cells = (
                f"{fraction:.0%}",
                method,
                " ".join(f"{x:.3f}" for x in accuracies),
            )
            table.add_row(*cells, f"{mean:.3f}", f"{100 * (mean - fedavg):+.1f}")
            console.print(*cells)
            rows.append({"fraction": fraction, "method": method, "accuracies": runs})
    console.print(table)
    write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
