"""Accuracy against the bytes that a node sends, by distiller, bits of a pixel and images a class.

``python -m benchmarks.bytes --data-root DIR [--quick] [--plot FILE] [--json FILE]``

MNIST, all classes on one node. LeNet learns with random changes (3,000 steps, mean of three seeds)
from virtual data as they arrive, and from random real images that are packed in the same way. With
``--quick`` it is one seed, 1,000 steps, 4 bits and at most 10 virtual images a class.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from cli.judge import LENET, train_and_score
from distill import VirtualData, distiller
from task.datasets import Dataset, Samples, load_dataset

METHODS: Mapping[str, Mapping[str, Any]] = {
    "dm": {"formation": 2},
    "kip": {},
}
SENT_BITS = 4
REAL_A_VIRTUAL = 3
"""Real digits pack three times as well as virtual ones."""


@dataclass(frozen=True)
class Extent:
    """How much is measured."""

    seeds: int
    steps: int
    bits: tuple[int, ...]
    per_class: tuple[int, ...]


FULL = Extent(seeds=3, steps=LENET.steps, bits=(8, 4, 3, 2), per_class=(1, 3, 10, 30))
QUICK = Extent(seeds=1, steps=1000, bits=(SENT_BITS,), per_class=(1, 3, 10))


def packed_sets(train: Samples, num_classes: int, extent: Extent) -> Iterator[dict[str, Any]]:
    """Each set with its method, bits, images a class and bytes."""
    for method, options in METHODS.items():
        for per_class in extent.per_class:
            virtual = distiller(method)(
                train.inputs,
                train.labels,
                num_classes=num_classes,
                per_class=per_class,
                generator=torch.Generator().manual_seed(0),
                **options,
            )
            for bits in extent.bits:
                yield _sent(virtual, bits, per_class)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    labels = train.labels[order]
    for per_class in (REAL_A_VIRTUAL * n for n in extent.per_class):
        chosen = torch.cat([order[labels == c][:per_class] for c in range(num_classes)])
        own = train.subset(chosen)
        real = VirtualData(own.inputs, own.labels, "real", steps=0, seed=0, init="real")
        yield _sent(real, SENT_BITS, per_class)


def measured(data: Dataset, extent: Extent) -> Iterator[dict[str, Any]]:
    """Rows of the table: each set with its accuracy, the mean of the seeds."""
    judge = replace(LENET, steps=extent.steps)
    train, test = data.train.to_samples(data.spec), data.test.to_samples(data.spec)
    for row in packed_sets(train, data.spec.num_classes, extent):
        decoded = row.pop("received").decoded()
        samples = Samples(decoded.images, decoded.labels)
        scores = [
            train_and_score(judge, samples, test, data.spec, seed=seed)
            for seed in range(extent.seeds)
        ]
        yield {**row, "accuracy": statistics.mean(scores)}


def plotted(rows: list[dict[str, Any]]) -> Figure:
    """Accuracy by bytes; a line for each method and number of bits."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    colours = dict(zip(("dm", "kip", "real"), ("tab:blue", "tab:orange", "tab:grey"), strict=True))
    for method, bits in dict.fromkeys((row["method"], row["bits"]) for row in rows):
        own = [row for row in rows if (row["method"], row["bits"]) == (method, bits)]
        axes.plot(
            [row["bytes"] / 1000 for row in own],
            [row["accuracy"] for row in own],
            marker="o",
            markersize=3,
            color=colours[method],
            linewidth=2 if bits == SENT_BITS else 0.8,
            linestyle={8: ":", 4: "-", 3: "-.", 2: "--"}[bits],
            label=f"{method}, {bits} bits",
        )
    axes.set(xscale="log", xlabel="kB that a node sends", ylabel="accuracy of LeNet")
    axes.xaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def _sent(virtual: VirtualData, bits: int, per_class: int) -> dict[str, Any]:
    data = virtual.to_bytes(bits)
    return {
        "method": virtual.method,
        "bits": bits,
        "per_class": per_class,
        "bytes": len(data),
        "received": VirtualData.from_bytes(data),
    }


def main() -> None:
    """Measure, print a table, draw the curve and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="one seed, 1,000 steps, fewer images")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curve there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    arguments = parser.parse_args()
    console = Console()
    table = Table("method", "bits", "images a class", "bytes", "accuracy")
    rows = []
    data = load_dataset("mnist", arguments.data_root)
    for row in measured(data, QUICK if arguments.quick else FULL):
        rows.append(row)
        cells = [str(row[key]) for key in ("method", "bits", "per_class")]
        cells += [f"{row['bytes']:,}", f"{row['accuracy']:.3f}"]
        table.add_row(*cells)
        console.print(", ".join(cells))
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    console.print(table)
    if arguments.plot is not None:
        plotted(rows).savefig(arguments.plot)


if __name__ == "__main__":
    main()
