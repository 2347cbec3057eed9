"""Accuracy of networks trained on virtual data, by distiller and by classes per node.

``python -m benchmarks.accuracy [--dataset mnist --data-root DIR] [--methods kip dm ...]
[--per-class 1 10] [--seconds S] [--judges quick LeNet ...] [--json FILE]``

All classes on one node, or one class per node (with at most 600 images per class, as on 100 nodes
of MNIST). Networks are trained on the pooled virtual data as they arrive, with 4 bits per pixel,
and tested on the dataset's test part (mean of three). Seconds are a core's, of all nodes one after
another; set OMP_NUM_THREADS=1. With ``--seconds`` each method does as many steps as fit into them,
not as many as it would.

``python -m benchmarks.accuracy --quick --data-root DIR [--judges LeNet ConvNet ...] [--seeds 0 1 2]
[--pools mnist10_all ...] [--json FILE]``

MNIST, the bytes of 10 images per class (7,840 each): networks trained with random changes on what
the best distiller makes of all classes on one node, and of single classes on ten nodes; and on
random real images. With 4 bits a pixel, packed, these bytes hold 33 virtual images a class (30 of
single-class nodes), of four smaller ones each, or 90 real ones; what was sent is printed. The last
row has 10 real images. One seed if not told, else the JSON file has the means.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.figures import write_json
from flwr_distill.cli.judge import JUDGES, LENET, QUICK, Judge, judges, train_and_score
from flwr_distill.distill import VirtualData, distiller
from flwr_distill.distill.registry import Progress, formation_arguments
from flwr_distill.task.datasets import DataSpec, Samples, load_dataset

METHODS = ("kip", "kip-negatives", "dm")
CLASSES_A_NODE = ("all", "1")
IMAGES_A_CLASS = 600
SEEDS = 3
MOST_NODES = 1000
TRIAL_STEPS = 10
TRIAL_SECONDS = 2.0
BEST = "dm"
BITS = 4
POOLS: dict[str, tuple[str | None, int]] = {
    "mnist10_all": ("all", 33),
    "mnist10_single": ("1", 30),
    "random_real": (None, 90),
    "ten_real": (None, 10),
}
"""Classes per node, none for real images, and images per class: the first three take at most the
bytes of 10 with 8 bits, not packed."""


def nodes(train: Samples, num_classes: int, classes: str) -> list[tuple[Tensor, Tensor]]:
    """Split the training part: all on one node, or one class per node."""
    if classes == "all":
        return [(train.inputs, train.labels)]
    places = [(train.labels == c).nonzero()[:IMAGES_A_CLASS, 0] for c in range(num_classes)]
    return [(train.inputs[own], train.labels[own]) for own in places]


def distilled(
    method: str,
    sets: list[tuple[Tensor, Tensor]],
    num_classes: int,
    per_class: int,
    steps: int | None = None,
    progress: Progress | None = None,
    seed: int = 0,
) -> list[VirtualData]:
    """Distil each node's set, in the formation that the method chooses."""
    return [
        distiller(method)(
            images,
            labels,
            num_classes=num_classes,
            per_class=per_class,
            steps=steps,
            generator=torch.Generator().manual_seed(MOST_NODES * seed + place),
            progress=progress,
            **formation_arguments(method, 0),
        )
        for place, (images, labels) in enumerate(sets)
    ]


class _TrialEndsError(Exception):
    pass


def steps_within(seconds: float, distil: Callable[..., Any]) -> int:
    """How many steps a core does in that time, judged by the first few; at least 1.

    `distil` takes `steps` and `progress`.
    """
    ends: list[float] = []

    def stop(step: int, steps: int, loss: float) -> None:
        ends.append(time.process_time())
        if step == TRIAL_STEPS or (step > 1 and ends[-1] - ends[0] > TRIAL_SECONDS):
            raise _TrialEndsError

    begin = time.process_time()
    with suppress(_TrialEndsError):
        distil(steps=10_000, progress=stop)
    step = (ends[-1] - ends[0]) / (len(ends) - 1)
    preparation = max(0.0, ends[0] - begin - step)
    return max(1, int((seconds - preparation) / step))


def arrived(pool: list[VirtualData]) -> tuple[Samples, int]:
    """What arrives with 4 bits per pixel, as one training set, and its bytes."""
    parcels = [virtual.to_bytes(BITS) for virtual in pool]
    decoded = [VirtualData.from_bytes(parcel).decoded() for parcel in parcels]
    labels = [v.labels if v.soft_labels is None else v.soft_labels for v in decoded]
    samples = Samples(torch.cat([v.images for v in decoded]), torch.cat(labels))
    return samples, sum(map(len, parcels))


def random_real(train: Samples, num_classes: int, per_class: int, seed: int = 0) -> VirtualData:
    """Random real images, to be sent like virtual ones."""
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    labels = train.labels[order]
    chosen = train.subset(torch.cat([order[labels == c][:per_class] for c in range(num_classes)]))
    return VirtualData(chosen.inputs, chosen.labels, "real", steps=0, seed=seed, init="real")


def quick(arguments: argparse.Namespace, console: Console) -> None:
    """Accuracies of judges on MNIST, by what they were trained on; LeNet if none is named."""
    data = load_dataset("mnist", arguments.data_root)
    train, test = data.train.to_samples(data.spec), data.test.to_samples(data.spec)
    panel = _panel(arguments, LENET, data.spec)
    results: dict[str, list[float]] = {}
    for seed, name in product(arguments.seeds, arguments.pools):
        with console.status(name):
            start = time.process_time()
            pool = _pool(name, train, data.spec.num_classes, seed)
            samples, size = arrived(pool)
            took = time.process_time() - start
        console.print(f"{name}, seed {seed}: {size:,} bytes, {took:.0f} s of a core")
        for judge in panel:
            key = f"{name}_{judge.name.lower()}"
            with console.status(key):
                accuracy = train_and_score(judge, samples, test, data.spec, seed=seed)
            results.setdefault(key, []).append(accuracy)
            console.print(f"{key}, seed {seed}: {accuracy:.4f}")
            means = {key: statistics.mean(own) for key, own in results.items()}
            write_json(arguments.json, means)


def _pool(name: str, train: Samples, num_classes: int, seed: int) -> list[VirtualData]:
    """What all nodes send in one of the cases of `POOLS`."""
    classes, per_class = POOLS[name]
    if classes is None:
        return [random_real(train, num_classes, per_class, seed)]
    own = nodes(train, num_classes, classes)
    return distilled(BEST, own, num_classes, per_class, seed=seed)


def by_distiller(arguments: argparse.Namespace, console: Console) -> None:
    """Rows of the whole table, which is printed."""
    data = load_dataset(arguments.dataset, arguments.data_root)
    train, test = data.train.to_samples(data.spec), data.test.to_samples(data.spec)
    panel = _panel(arguments, QUICK, data.spec)
    titles = "images a class", "classes a node", "distiller", "steps", "seconds", "bytes"
    table = Table(*titles, *(judge.name for judge in panel))
    rows: list[dict[str, Any]] = []
    cases = product(arguments.per_class, CLASSES_A_NODE, arguments.methods)
    for per_class, classes, method in cases:
        sets = nodes(train, data.spec.num_classes, classes)
        distil = partial(distilled, method, num_classes=data.spec.num_classes, per_class=per_class)
        with console.status(f"{method}, {per_class} a class, {classes} per node"):
            steps = None
            if arguments.seconds is not None:
                one = partial(distil, sets[:1])
                steps = steps_within(arguments.seconds / len(sets), one)
            start = time.process_time()
            pool = distil(sets, steps=steps)
            seconds = time.process_time() - start
            samples, size = arrived(pool)
            accuracies = {
                judge.name: statistics.mean(
                    train_and_score(judge, samples, test, data.spec, seed=seed)
                    for seed in range(SEEDS)
                )
                for judge in panel
            }
        row = {
            "per_class": per_class,
            "classes": classes,
            "method": method,
            "steps": pool[0].steps,
            "seconds": seconds,
            "bytes": size,
        }
        rows.append({**row, "accuracy": accuracies})
        cells = [f"{x:.1f}" if isinstance(x, float) else str(x) for x in row.values()]
        cells += [f"{accuracy:.3f}" for accuracy in accuracies.values()]
        table.add_row(*cells)
        console.print(", ".join(cells))
        write_json(arguments.json, rows)
    console.print(table)


def _panel(arguments: argparse.Namespace, usual: Judge, spec: DataSpec) -> list[Judge]:
    """The named judges, in that order, that fit the data."""
    fitting = {judge.name: judge for judge in judges("full", spec)}
    return [fitting[name] for name in arguments.judges or [usual.name] if name in fitting]


def main() -> None:
    """Measure, print and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few numbers, on MNIST")
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--data-root", type=Path, default=None)
    parser.add_argument("--per-class", type=int, nargs="+", default=(10,))
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--seconds", type=float, help="of a core, for each method and row")
    parser.add_argument("--judges", nargs="+", choices=[j.name for j in JUDGES["full"]])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="with --quick")
    parser.add_argument(
        "--pools", nargs="+", choices=POOLS, default=list(POOLS), help="with --quick"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    arguments = parser.parse_args()
    (quick if arguments.quick else by_distiller)(arguments, Console())


if __name__ == "__main__":
    main()
