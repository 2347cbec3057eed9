"""FedLGD against FedAvg and FedProx on the same virtual data, on nodes of three domains.

``python -m benchmarks.fedlgd --data-root DIR [--seeds 0 1] [--rounds 60] [--methods FedProx FedLGD]
[--own] [--json FILE]``

One node each with MNIST, USPS and MNIST-M, 3,000 images as 3x32x32 and 1,000 to test on
(`benchmarks.domains`); ConvNet-3 with group norm and 32 filters, 10 virtual images per class, SGD,
lr 0.01, batches of 32, one local epoch. "lambda 10" uses the paper's contrastive weight for DIGITS.
``--own`` has our own settings of all methods: each virtual image holds 2 x 2 smaller ones, a
learning rate that falls from 0.05 as a cosine, and random changes of images.
Accuracy per domain and unweighted mean, over the last five rounds. In this process, with the real
apps.
"""

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.figures import read_lines, write_json
from benchmarks.in_process import FIRST_NODE, Settings, run_in_process

DOMAINS = ("mnist", "usps", "mnist_m")
LAST_ROUNDS = 5
SETTING: Settings = {
    "strategy": "fedlgd",
    "dataset": "private",
    "private.shape": "3x32x32",
    "model": "convnet3-gn32",
    "fraction-evaluate": 1.0,
    "train.lr": 0.01,
    "train.batch-size": 32,
    "train.local-epochs": 1,
    "phase-timeout": 3600.0,
}
OWN: Settings = {
    "fedlgd.formation": 2,
    "train.lr": 0.05,
    "train.lr-schedule": "cosine",
    "train.augment": "shift,scale,rotate",
}
METHODS: dict[str, Settings] = {
    "FedAvg": {"fedlgd.selections": 0},
    "FedProx": {"fedlgd.selections": 0, "train.proximal-mu": 0.01},
    "FedLGD": {},
    "lambda 10": {"fedlgd.contrast": 10.0},
}
"""The first two train on the nodes' initial virtual data only."""


def domain_accuracies(run_config: Settings, folder: Path) -> list[float]:
    """Accuracy per domain over the last rounds; reuses nodes' virtual data in `folder`."""
    nodes = [{"dataset": f"benchmarks.domains:{domain}"} for domain in DOMAINS]
    run_in_process({**SETTING, **run_config}, nodes, folder)
    journal = read_lines(folder / "1" / "journal.jsonl")
    phases = [entry for entry in journal if entry.get("phase") == "evaluate"]
    return [
        statistics.mean(
            phase["nodes"][str(FIRST_NODE + place)]["eval-accuracy"]
            for phase in phases[-LAST_ROUNDS:]
        )
        for place in range(len(DOMAINS))
    ]


def main() -> None:
    """Run all methods, print the table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root", required=True, help="folder of the three datasets")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["FedProx", "FedLGD"])
    parser.add_argument("--own", action="store_true", help="our own settings of all methods")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    arguments = parser.parse_args()

    console = Console()
    results: dict[str, list[list[float]]] = {
        method: [] for method in ("FedAvg", *arguments.methods)
    }
    for seed in arguments.seeds:
        run_config = {
            "seed": seed,
            "num-rounds": arguments.rounds,
            "data-root": arguments.data_root,
            **(OWN if arguments.own else {}),
        }
        with tempfile.TemporaryDirectory() as temporary:
            first = Path(temporary) / "FedAvg"
            for method in results:
                folder = Path(temporary) / method
                if folder != first:
                    shutil.copytree(first / "nodes", folder / "nodes")
                results[method].append(domain_accuracies({**run_config, **METHODS[method]}, folder))
                console.print(method, f"seed {seed}:", *_cells(results[method][-1]))
    table = Table("method", *DOMAINS, "mean", "over FedAvg")
    for method, runs in results.items():
        mean = [statistics.mean(domain) for domain in zip(*runs, strict=True)]
        ahead = statistics.mean(mean) - statistics.mean(map(statistics.mean, results["FedAvg"]))
        table.add_row(method, *_cells(mean), f"{100 * ahead:+.1f}")
    console.print(table)
    write_json(arguments.json, results)


def _cells(accuracies: list[float]) -> list[str]:
    return [f"{accuracy:.3f}" for accuracy in (*accuracies, statistics.mean(accuracies))]


if __name__ == "__main__":
    main()
