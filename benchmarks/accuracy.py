"""What virtual data are worth: a network's accuracy, by distiller and by classes a node holds.

Usage: ``python -m benchmarks.accuracy [--dataset mnist --data-root DIR] [--per-class N]
[--methods kip dm ...] [--json FILE]``. All classes lie on one node, or each node holds two, or
one; what the nodes distil is pooled, and a network trained on the pool is tested on the data
set's test part (mean of three). Nodes with few classes have at most 600 images a class, as 100
nodes of MNIST have. Each pool is judged as made and as it travels, with 8 bits a pixel.
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


def nodes(train: Samples, num_classes: int, held: str) -> list[tuple[Tensor, Tensor]]:
    """Share the training part out: all on one node, or so many classes to each."""
    if held == "all":
        return [(train.inputs, train.labels)]
    groups = torch.split(torch.arange(num_classes), int(held))
    places = [(train.labels == c).nonzero()[:IMAGES_A_CLASS, 0] for c in range(num_classes)]
    chosen = [torch.cat([places[int(c)] for c in group]) for group in groups]
    return [(train.inputs[own], train.labels[own]) for own in chosen]


def distilled(
    method: str, sets: list[tuple[Tensor, Tensor]], num_classes: int, per_class: int
) -> list[VirtualData]:
    """Distil each node's set, each with a generator of its own."""
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
    """Mean accuracy of networks that learned from the pool alone."""
    labels = [v.labels if v.soft_labels is None else v.soft_labels for v in pool]
    samples = Samples(torch.cat([v.images for v in pool]), torch.cat(labels))
    return statistics.mean(train_and_score(samples, test, spec, seed=i) for i in range(JUDGES))


def main() -> None:
    """Run all rows, print them as a table and, where asked, write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--data-root", type=Path, default=None)
    parser.add_argument("--per-class", type=int, default=10)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    arguments = parser.parse_args()

    data = load_dataset(arguments.dataset, arguments.data_root)
    train, test = data.train.to_samples(data.spec), data.test.to_samples(data.spec)
    table = Table("classes a node", "distiller", "seconds", "accuracy", "with 8 bits a pixel")
    rows = []
    console = Console()
    for held in CLASSES_A_NODE:
        sets = nodes(train, data.spec.num_classes, held)
        for method in arguments.methods:
            with console.status(f"{method}, {held} a node"):
                begin = time.perf_counter()
                pool = distilled(method, sets, data.spec.num_classes, arguments.per_class)
                seconds = time.perf_counter() - begin
                made = score(pool, test, data.spec)
                sent = [VirtualData.from_bytes(virtual.to_bytes()) for virtual in pool]
                row = {
                    "classes": held,
                    "method": method,
                    "seconds": seconds,
                    "accuracy": made,
                    "accuracy_8_bits": score(sent, test, data.spec),
                }
            rows.append(row)
            cells = (f"{seconds:.1f}", f"{made:.3f}", f"{row['accuracy_8_bits']:.3f}")
            table.add_row(held, method, *cells)
            console.print(f"{held} a node, {method}: {', '.join(cells)}")
    console.print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
