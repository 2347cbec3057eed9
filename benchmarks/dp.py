"""Accuracy under differential privacy, in this process.

``python -m benchmarks.dp [--only fedavg|hfldd|fedlgd|virtual] [--data digits] [--data-root DIR]
[--epsilons 1 8 inf] [--seeds N] [--json FILE] [--plot FILE.svg]``

10 nodes, 10 rounds, with samples of all classes or of two each: FedAvg with DP-SGD, its noise
chosen for each epsilon; FedLGD on virtual data from noisy class means; HFLDD (two classes) with
such of members, whose heads train on their own samples without differential privacy. Epsilon "inf"
is each without. Noise comes from the operating system, so no two runs are equal.

``virtual`` trains a network on virtual data of all classes alone, 10 images of a class from each
node (``--nodes 1``): LeNet with random changes of its images (3,000 steps), or the data set's own
network where the images are too small for it. Training data are spread over the nodes at random,
or by class (``--single-class``); each spends its own epsilon, and what they send is pooled. Its
noise comes from the seed: a benchmark protects nobody.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure
from opacus.accountants.utils import get_noise_multiplier
from torch import Generator, Tensor

from benchmarks.figures import read_lines, write_json
from benchmarks.in_process import Settings, run_in_process
from flwr_distill.base.text import counted
from flwr_distill.cli.judge import LENET, QUICK, judges, train_and_score
from flwr_distill.distill.distribution_matching import distill_dm
from flwr_distill.distill.private_matching import distill_dm_privately
from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.task.datasets import Dataset, Samples, load_dataset
from flwr_distill.task.settings import TrainSettings

NODES = 10
ROUNDS = 10
MINIBATCHES = 20
"""Of an epoch of DP-SGD, at most: its noise is as large for a minibatch of few samples."""
DELTA = 1e-5
SPLITS: dict[str, Settings] = {
    "all classes": {"partition.scheme": "iid"},
    "two classes": {"partition.scheme": "pathological", "partition.classes": 2},
}
STRATEGIES = ("fedavg", "hfldd", "fedlgd")
Play = Callable[[float, int], tuple[float, float]]
"""A run with an epsilon and a seed: its accuracy, and the epsilon that it spent."""


@dataclass(frozen=True)
class Row:
    """Accuracy of a series with one epsilon, and the epsilon that was spent; by seed."""

    series: str
    epsilon: float
    spent: float
    accuracy: float
    scores: list[float]


def settings_for(strategy: str, epsilon: float, samples: int) -> Settings:
    """Settings of a run whose nodes have so many samples; infinity is without privacy."""
    private = math.isfinite(epsilon)
    if strategy == "fedavg":
        if not private:
            return {"train.lr": 0.2}
        batch = max(TrainSettings().batch_size, samples // MINIBATCHES)
        noise = training_noise(epsilon, samples, batch)
        return {"train.lr": 0.2, "train.batch-size": batch, "train.dp-noise": noise}
    if strategy == "hfldd":
        matching: Settings = {"hfldd.distiller": "dm", "hfldd.start": "noise"}
        return {**matching, "hfldd.dp-epsilon": epsilon if private else 0.0}
    once: Settings = {"fedlgd.refine-steps": 0} if private else {}
    return {**once, "fedlgd.dp-epsilon": epsilon if private else 0.0}


def training_noise(epsilon: float, samples: int, batch: int) -> float:
    """Noise multiplier with which all rounds of DP-SGD on a node's samples spend epsilon."""
    train = TrainSettings()
    trained = samples - int(samples * train.holdout)
    steps = ROUNDS * train.local_epochs * math.ceil(trained / batch)
    return float(
        get_noise_multiplier(
            target_epsilon=epsilon,
            target_delta=DELTA,
            sample_rate=batch / trained,
            steps=steps,
            accountant="rdp",
        )
    )


def run(
    strategy: str, split: Settings, data: Dataset, data_root: str, epsilon: float, seed: int
) -> tuple[float, float]:
    """Accuracy after the last round, and the largest epsilon of a node (0 if none)."""
    settings = {
        "strategy": strategy,
        "dataset": data.spec.name,
        "data-root": data_root,
        "num-rounds": ROUNDS,
        "seed": seed,
        **split,
        **settings_for(strategy, epsilon, len(data.train) // NODES),
    }
    with tempfile.TemporaryDirectory() as folder:
        nodes = [{"num-partitions": NODES}] * NODES
        rows = run_in_process(settings, nodes, Path(folder))
        journal = read_lines(Path(folder) / "1" / "journal.jsonl")
    numbers = [n for line in journal for n in line.get("nodes", {}).values()]
    return rows[-1]["accuracy"], max((n.get("dp-epsilon", 0.0) for n in numbers), default=0.0)


def spread(labels: Tensor, nodes: int, single_class: bool, generator: Generator) -> list[Tensor]:
    """Each node's samples: a random share of all, or of one class."""
    order = torch.randperm(len(labels), generator=generator)
    if not single_class:
        return list(order.chunk(nodes))
    classes = torch.unique(labels)
    each = nodes // len(classes)
    return [part for c in classes for part in order[labels[order] == c].chunk(each)]


def virtual_accuracy(
    data: Dataset, epsilon: float, nodes: int = 1, seed: int = 0, single_class: bool = False
) -> float:
    """Accuracy of a network trained on the nodes' virtual data, each with its own epsilon."""
    train, test = (part.to_samples(data.spec) for part in (data.train, data.test))
    generator = torch.Generator().manual_seed(seed)
    asked: dict[str, Any] = {
        "num_classes": data.spec.num_classes,
        "per_class": 10,
        "generator": generator,
        "formation": 0,
    }
    distil: Callable[..., VirtualData] = distill_dm
    if math.isfinite(epsilon):
        distil = distill_dm_privately
        asked |= {"pixels": data.spec.pixels, "noise_generator": generator}
        asked |= {"epsilon": epsilon, "delta": DELTA}
    shares = spread(train.labels, nodes, single_class, generator)
    pool = [distil(train.inputs[own], train.labels[own], **asked).decoded() for own in shares]
    judge = LENET if LENET in judges("full", data.spec) else QUICK
    images, labels = (
        torch.cat(parts) for parts in zip(*((v.images, v.labels) for v in pool), strict=True)
    )
    return train_and_score(judge, Samples(images, labels), test, data.spec, seed=seed)


def measured(series: str, epsilon: float, play: Play, seeds: int) -> Row:
    """One row of the table."""
    scores, spent = zip(*(play(epsilon, seed) for seed in range(seeds)), strict=True)
    return Row(series, epsilon, max(spent), fmean(scores), list(scores))


def series_of(arguments: argparse.Namespace) -> dict[str, Play]:
    """Lines of the plot that were asked for."""
    data, root = load_dataset(arguments.data, arguments.data_root), str(arguments.data_root or "")
    series: dict[str, Play] = {
        f"{strategy}, {arguments.data}, {name}": partial(run, strategy, split, data, root)
        for strategy in STRATEGIES
        for name, split in SPLITS.items()
        if arguments.only in (None, strategy)
        # Where a node has all classes, HFLDD's clusters are of one node; nobody sends virtual data.
        and (strategy, name) != ("hfldd", "all classes")
    }
    if arguments.only in (None, "virtual"):
        nodes = counted(arguments.nodes, "node")
        kind = " of one class" if arguments.single_class else ""

        def virtual(epsilon: float, seed: int) -> tuple[float, float]:
            pooled = (arguments.nodes, seed, arguments.single_class)
            return virtual_accuracy(data, epsilon, *pooled), epsilon

        series[f"virtual data, {arguments.data}, {nodes}{kind}"] = virtual
    return series


def plotted(rows: list[Row]) -> Figure:
    """Accuracy by epsilon, a line for each series; without noise, as a dotted one."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    for series in dict.fromkeys(row.series for row in rows):
        own = sorted((row.epsilon, row.accuracy) for row in rows if row.series == series)
        finite = [point for point in own if math.isfinite(point[0])]
        epsilons, accuracies = ([point[i] for point in finite] for i in (0, 1))
        (line,) = axes.plot(epsilons, accuracies, marker="o", label=series)
        for _, accuracy in own[len(finite) :]:
            axes.axhline(accuracy, color=line.get_color(), linestyle=":", linewidth=1)
    axes.set(xscale="log", xlabel="epsilon of each sample", ylabel="accuracy", ylim=(0, 1))
    axes.minorticks_off()
    axes.set_xticks(ticks := sorted({row.epsilon for row in rows if math.isfinite(row.epsilon)}))
    axes.set_xticklabels(f"{epsilon:g}" for epsilon in ticks)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def main() -> None:
    """Print a table; continue from one that was stopped, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=[*STRATEGIES, "virtual"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[0.5, 1, 2, 4, 8, math.inf])
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--single-class", action="store_true", help="each node has one class")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows in it are not run again")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="of all rows in the JSON file")
    arguments = parser.parse_args()
    if arguments.single_class:
        classes = load_dataset(arguments.data, arguments.data_root).spec.num_classes
        if arguments.nodes % classes:
            parser.error(f"--single-class needs --nodes to be a multiple of {classes} classes")
    rows: list[Row] = []
    if arguments.json is not None and arguments.json.exists():
        rows = [Row(**row) for row in json.loads(arguments.json.read_text())]
    known = {(row.series, row.epsilon) for row in rows}
    for series, play in series_of(arguments).items():
        for epsilon in arguments.epsilons:
            if (series, epsilon) in known:
                continue
            row = measured(series, epsilon, play, arguments.seeds)
            scores = ", ".join(f"{score:.3f}" for score in row.scores)
            print(
                f"{series}: epsilon {epsilon:g} (spent {row.spent:.2f}), "
                f"accuracy {row.accuracy:.3f} ({scores})",
                flush=True,
            )
            rows.append(row)
            write_json(arguments.json, [asdict(row) for row in rows])
    if arguments.plot is not None:
        plotted(rows).savefig(arguments.plot)


if __name__ == "__main__":
    main()
