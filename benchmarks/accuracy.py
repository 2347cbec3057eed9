"""Accuracy of networks trained on virtual data, by distiller and by classes per node.

``python -m benchmarks.accuracy [--dataset mnist --data-root DIR] [--per-class N] [--methods kip dm
...] [--json FILE]``

All classes on one node, or two or one class per node (with at most 600 images per class, as on 100
nodes of MNIST). A network is trained on the pooled virtual data, original and sent with 8 bits per
pixel, and tested on the dataset's test part (mean of three).
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from cli.judge import train_and_score
from distill import VirtualData, distiller
from task.datasets import DataSpec, Samples, load_dataset

METHODS = ("kip", "kip-negatives", "kip-labels", "kip-nngp", "kip-rbf", "dm", "gm")
CLASSES_A_NODE = ("all", "2", "1")
IMAGES_A_CLASS = 600
JUDGES = 3


def nodes(train: Samples, num_classes: int, classes: str) -> list[tuple[Tensor, Tensor]]:
    """Split the training part: all on one node, or `held` classes per node."""
    if classes == "all":
        return [(train.inputs, train.labels)]
    groups = torch.split(torch.arange(num_classes), int(classes))
    places = [(train.labels == c).nonzero()[:IMAGES_A_CLASS, 0] for c in range(num_classes)]
    chosen = [torch.cat([places[int(c)] for c in group]) for group in groups]
    return [(train.inputs[own], train.labels[own]) for own in chosen]


def distilled(
    method: str, sets: list[tuple[Tensor, Tensor]], num_classes: int, per_class: int
) -> list[VirtualData]:
    """Distil each node's set."""
    return [
        distiller(method)(
            images,
            labels,
            num_classes=num_classes,
            per_class=per_class,
            generator=torch.Generator().manual_seed(place),
        )
        for place, (images, labels) in enumerate(sets)
    ]


def score(pool: list[VirtualData], test: Samples, spec: DataSpec) -> float:
    """Mean accuracy of networks trained on the pool."""
    labels = [v.labels if v.soft_labels is None else v.soft_labels for v in pool]
    samples = Samples(torch.cat([v.images for v in pool]), torch.cat(labels))
    return statistics.mean(train_and_score(samples, test, spec, seed=i) for i in range(JUDGES))


def main() -> None:
    """Run all rows, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--data-root", type=Path, default=None)
    parser.add_argument("--per-class", type=int, default=10)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    arguments = parser.parse_args()

    data = load_dataset(arguments.dataset, arguments.data_root)
    train, test = data.train.to_samples(data.spec), data.test.to_samples(data.spec)
    table = Table("classes per node", "distiller", "seconds", "accuracy", "with 8 bits per pixel")
    rows = []
    console = Console()
    for classes in CLASSES_A_NODE:
        sets = nodes(train, data.spec.num_classes, classes)
        for method in arguments.methods:
            with console.status(f"{method}, {classes} per node"):
                start = time.perf_counter()
                pool = distilled(method, sets, data.spec.num_classes, arguments.per_class)
                seconds = time.perf_counter() - start
                accuracy = score(pool, test, data.spec)
                restored = [VirtualData.from_bytes(virtual.to_bytes()) for virtual in pool]
                row = {
                    "classes": classes,
                    "method": method,
                    "seconds": seconds,
                    "accuracy": accuracy,
                    "accuracy_8_bits": score(restored, test, data.spec),
                }
            rows.append(row)
            cells = (f"{seconds:.1f}", f"{accuracy:.3f}", f"{row['accuracy_8_bits']:.3f}")
            table.add_row(classes, method, *cells)
            console.print(f"{classes} per node, {method}: {', '.join(cells)}")
    console.print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
