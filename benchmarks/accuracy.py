"""Accuracy of networks trained on virtual data, by distiller and by classes per node.

``python -m benchmarks.accuracy [--dataset mnist --data-root DIR] [--per-class N] [--methods kip dm
...] [--judge quick|full] [--json FILE]``

All classes on one node, or two or one class per node (with at most 600 images per class, as on 100
nodes of MNIST). A network is trained on the pooled virtual data, original and sent with 8 bits per
pixel, and tested on the dataset's test part (mean of three); with ``--judge full`` each of the
judges of ``flwr-distill distill``.

``python -m benchmarks.accuracy --quick --data-root DIR [--json FILE]``

MNIST, the bytes of 10 images per class (7,840 each), one seed: LeNet trained with random changes on
what the best distiller makes of all classes on one node, and of single classes on ten nodes; and on
random real images. With 4 bits a pixel, packed, these bytes hold 30 virtual images a class, of four
smaller ones each, or 90 real ones; what was sent is printed.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from cli.judge import LENET, Judge, judges, train_and_score
from distill import VirtualData, distiller
from task.datasets import DataSpec, Samples, load_dataset

METHODS = ("kip", "kip-negatives", "kip-labels", "kip-nngp", "kip-rbf", "dm", "gm")
CLASSES_A_NODE = ("all", "2", "1")
IMAGES_A_CLASS = 600
SEEDS = 3
BEST = "dm"
FORMATION = 2
BITS = 4
IN_TEN, REAL_IN_TEN = 30, 90
"""Images per class, virtual and real, that take at most the bytes of 10 with 8 bits, not packed."""


def nodes(train: Samples, num_classes: int, classes: str) -> list[tuple[Tensor, Tensor]]:
    """Split the training part: all on one node, or `held` classes per node."""
    if classes == "all":
        return [(train.inputs, train.labels)]
    groups = torch.split(torch.arange(num_classes), int(classes))
    places = [(train.labels == c).nonzero()[:IMAGES_A_CLASS, 0] for c in range(num_classes)]
    chosen = [torch.cat([places[int(c)] for c in group]) for group in groups]
    return [(train.inputs[own], train.labels[own]) for own in chosen]


def distilled(
    method: str,
    sets: list[tuple[Tensor, Tensor]],
    num_classes: int,
    per_class: int,
    **options: Any,
) -> list[VirtualData]:
    """Distil each node's set; options are arguments of the method's own."""
    return [
        distiller(method)(
            images,
            labels,
            num_classes=num_classes,
            per_class=per_class,
            generator=torch.Generator().manual_seed(place),
            **options,
        )
        for place, (images, labels) in enumerate(sets)
    ]


def sent(pool: list[VirtualData]) -> list[VirtualData]:
    """The virtual data as they arrive with 8 bits per pixel."""
    return [VirtualData.from_bytes(virtual.to_bytes()) for virtual in pool]


def packed(name: str, pool: list[VirtualData], console: Console) -> Samples:
    """What arrives with 4 bits per pixel, as one training set; its bytes are printed."""
    parcels = [virtual.to_bytes(BITS) for virtual in pool]
    console.print(f"{name}: {sum(map(len, parcels)):,} bytes")
    return pooled([VirtualData.from_bytes(parcel) for parcel in parcels])


def pooled(pool: list[VirtualData]) -> Samples:
    """The virtual data of all nodes as one training set."""
    decoded = [virtual.decoded() for virtual in pool]
    labels = [v.labels if v.soft_labels is None else v.soft_labels for v in decoded]
    return Samples(torch.cat([v.images for v in decoded]), torch.cat(labels))


def score(
    panel: tuple[Judge, ...], pool: list[VirtualData], test: Samples, spec: DataSpec
) -> dict[str, float]:
    """Mean accuracy of each judge's networks trained on the pool."""
    train = pooled(pool)
    return {
        judge.name: statistics.mean(
            train_and_score(judge, train, test, spec, seed=seed) for seed in range(SEEDS)
        )
        for judge in panel
    }


def quick(data_root: Path | None, console: Console) -> dict[str, float]:
    """Accuracies of LeNet on MNIST, by what it was trained on."""
    data = load_dataset("mnist", data_root)
    train, test = data.train.to_samples(data.spec), data.test.to_samples(data.spec)
    sets = {}
    for name, classes in (("mnist10_all_lenet", "all"), ("mnist10_single_lenet", "1")):
        own = nodes(train, data.spec.num_classes, classes)
        with console.status(f"{BEST}, {classes} per node"):
            start = time.perf_counter()
            pool = distilled(BEST, own, data.spec.num_classes, IN_TEN, formation=FORMATION)
            console.print(f"{BEST}, {classes} per node: {time.perf_counter() - start:.0f} s")
        sets[name] = packed(name, pool, console)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    labels = train.labels[order]
    chosen = [order[labels == c][:REAL_IN_TEN] for c in range(data.spec.num_classes)]
    own_images = train.subset(torch.cat(chosen))
    real = VirtualData(own_images.inputs, own_images.labels, "real", steps=0, seed=0, init="real")
    sets["random_real_lenet"] = packed("random_real_lenet", [real], console)
    results = {}
    for name, samples in sets.items():
        with console.status(f"{LENET.name}, {name}"):
            results[name] = train_and_score(LENET, samples, test, data.spec, seed=0)
        console.print(f"{name}: {results[name]:.3f}")
    return results


def by_distiller(arguments: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Rows of the whole table, which is printed."""
    data = load_dataset(arguments.dataset, arguments.data_root)
    train, test = data.train.to_samples(data.spec), data.test.to_samples(data.spec)
    panel = judges(arguments.judge, data.spec)
    columns = [title for judge in panel for title in (judge.name, f"{judge.name}, 8 bits")]
    table = Table("classes per node", "distiller", "seconds", *columns)
    rows = []
    for classes in CLASSES_A_NODE:
        sets = nodes(train, data.spec.num_classes, classes)
        for method in arguments.methods:
            with console.status(f"{method}, {classes} per node"):
                start = time.perf_counter()
                pool = distilled(method, sets, data.spec.num_classes, arguments.per_class)
                seconds = time.perf_counter() - start
                row = {
                    "classes": classes,
                    "method": method,
                    "seconds": seconds,
                    "accuracy": score(panel, pool, test, data.spec),
                    "accuracy_8_bits": score(panel, sent(pool), test, data.spec),
                }
            rows.append(row)
            pairs = zip(row["accuracy"].values(), row["accuracy_8_bits"].values(), strict=True)
            cells = [f"{seconds:.1f}", *(f"{value:.3f}" for pair in pairs for value in pair)]
            table.add_row(classes, method, *cells)
            console.print(f"{classes} per node, {method}: {', '.join(cells)}")
    console.print(table)
    return rows


def main() -> None:
    """Run all rows, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three numbers, on MNIST")
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--data-root", type=Path, default=None)
    parser.add_argument("--per-class", type=int, default=10)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--judge", choices=("quick", "full"), default="quick")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    arguments = parser.parse_args()
    console = Console()
    if arguments.quick:
        results: Any = quick(arguments.data_root, console)
    else:
        results = by_distiller(arguments, console)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
