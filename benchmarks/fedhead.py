"""FedHEAD against FedAvg by round, with the paper's local training.

``python -m benchmarks.fedhead [--dataset digits] [--data-root DIR] [--model digits-cnn]
[--strategies fedavg fedhead] [--seeds 0 1 2] [--rounds 20] [--json FILE]``

Test accuracy (mean over seeds) of ten nodes in two sectors, Dirichlet 0.1; Adam, lr 1e-3, weight
decay 1e-4, batches of 128, 20 local and at most 20 distillation epochs; in this process, with the
real apps. ``--dataset benchmarks.fedhead:plain_digits`` (or ``:plain_cifar10``) has pixels in [0,
1] instead of normalised ones; ``--model benchmarks.fedhead:plain_cnn`` learns more slowly than
digits-cnn.
"""

import argparse
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.figures import write_json
from benchmarks.in_process import Settings, run_in_process
from flwr_distill.cli.demo import FEDHEAD_TASK
from flwr_distill.task.datasets import Dataset, DataSpec, RawSamples, load_dataset

NODES = 10
SHOWN = (1, 2, 3, 5, 10, 20)
WORDS = 20
"""Of a shortened text; a biLSTM's time grows with them."""
SETTING: Settings = {**FEDHEAD_TASK, "train.holdout": 0.0}


def plain_digits(root: Path, download: bool) -> Dataset:
    """The embedded digits with pixels in [0, 1]: a plug-in for ``dataset``."""
    return _plain(load_dataset("digits"))


def plain_cifar10(root: Path, download: bool) -> Dataset:
    """CIFAR-10 with pixels in [0, 1]: a plug-in for ``dataset``."""
    return _plain(load_dataset("cifar10", root, download=download))


def _plain(dataset: Dataset) -> Dataset:
    channels = dataset.spec.shape[0]
    spec = replace(dataset.spec, mean=(0.0,) * channels, std=(1.0,) * channels)
    return replace(dataset, spec=spec)


def half_cifar10(root: Path, download: bool) -> Dataset:
    """CIFAR-10 at half its size: a plug-in for ``dataset``."""
    return _halved(load_dataset("cifar10", root, download=download))


def half_cifar100(root: Path, download: bool) -> Dataset:
    """CIFAR-100 at half its size: a plug-in for ``dataset``."""
    return _halved(load_dataset("cifar100", root, download=download))


def short_ag_news(root: Path, download: bool) -> Dataset:
    """AG News, the first words of each text alone: a plug-in for ``dataset``."""
    return _shortened(load_dataset("ag-news", root, download=download))


def short_sst_2(root: Path, download: bool) -> Dataset:
    """SST-2, the first words of each sentence alone: a plug-in for ``dataset``."""
    return _shortened(load_dataset("sst-2", root, download=download))


def _shortened(dataset: Dataset) -> Dataset:
    """The same texts, of at most `WORDS` words: what follows is padding, which costs no time."""

    def shortened(samples: RawSamples) -> RawSamples:
        ids = samples.images.copy()
        ids[..., WORDS:] = 0
        return RawSamples(ids, samples.labels)

    return replace(dataset, train=shortened(dataset.train), test=shortened(dataset.test))


def _halved(dataset: Dataset) -> Dataset:
    """A pixel for each block of two by two."""
    channels, height, width = dataset.spec.shape
    spec = replace(dataset.spec, shape=(channels, height // 2, width // 2))

    def halved(samples: RawSamples) -> RawSamples:
        blocks = samples.images.reshape(-1, channels, height // 2, 2, width // 2, 2)
        sums = blocks.sum(axis=(3, 5), dtype=np.uint16)
        return RawSamples(((sums + 2) // 4).astype(np.uint8), samples.labels)

    return Dataset(spec, halved(dataset.train), halved(dataset.test))


def plain_cnn(spec: DataSpec) -> nn.Module:
    """Two 3x3 convolutions (16, 32), each with 2x2 max pooling, and one dense layer."""
    channels, height, width = spec.shape
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), spec.num_classes),
    )


def main() -> None:
    """Run the strategies, print the table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--data-root", default="")
    parser.add_argument("--model", default="digits-cnn")
    parser.add_argument("--strategies", nargs="+", default=["fedavg", "fedhead"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    arguments = parser.parse_args()

    console = Console()
    shown = [r for r in SHOWN if r < arguments.rounds] + [arguments.rounds]
    table = Table("strategy", *[f"round {r}" for r in shown])
    results: dict[str, list[list[float]]] = {}
    for strategy in arguments.strategies:
        results[strategy] = []
        for seed in arguments.seeds:
            run_config = {
                **SETTING,
                "strategy": strategy,
                "fedhead.least-classes": 0.0,  # the paper's
                "fedhead.least-gain": 0.0,  # the paper's
                "dataset": arguments.dataset,
                "data-root": arguments.data_root,
                "model": arguments.model,
                "seed": seed,
                "num-rounds": arguments.rounds,
            }
            rows = run_in_process(run_config, [{"num-partitions": NODES}] * NODES)
            accuracies = [float(row["accuracy"]) for row in rows]
            console.print(strategy, "seed", seed, *[f"{accuracies[r]:.3f}" for r in shown])
            results[strategy].append(accuracies)
        means = [statistics.mean(run[r] for run in results[strategy]) for r in shown]
        table.add_row(strategy, *[f"{mean:.3f}" for mean in means])
    console.print(table)
    write_json(arguments.json, results)


if __name__ == "__main__":
    main()
