"""Accuracy against the bytes that a node sends, by distiller, bits of a pixel and images a class.

``python -m benchmarks.bytes --data-root DIR --json FILE [--quick] [--plot FILE]``

MNIST, all classes on one node. LeNet learns with random changes (3,000 steps, mean of three seeds)
from virtual data as they arrive, and from random real images that are packed in the same way. With
``--quick`` it is one seed, 1,000 steps and 4 bits. Rows that are in FILE are not measured again, so
that a run that was stopped continues.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.accuracy import random_real
from benchmarks.figures import write_json
from flwr_distill.cli.judge import LENET, train_and_score
from flwr_distill.distill import VirtualData, distiller
from flwr_distill.distill.registry import formation_arguments
from flwr_distill.task.datasets import Dataset, Samples, load_dataset

METHODS = ("dm", "kip", "kip-negatives")
SENT_BITS = 4
REAL_A_VIRTUAL = 3
"""Real digits pack three times as well as virtual ones."""


@dataclass(frozen=True)
class Extent:
    """How much is measured."""

    seeds: int
    steps: int
    bits: tuple[int, ...]


FULL = Extent(seeds=3, steps=LENET.steps, bits=(SENT_BITS, 8, 3, 2))
QUICK = Extent(seeds=1, steps=1000, bits=(SENT_BITS,))
PER_CLASS = (1, 3, 10, 30)

Row = dict[str, Any]
"""Method, seeds, steps, bits, images per class and bytes, and the accuracy."""


def cases(extent: Extent) -> list[Row]:
    """What is measured; rows of one set of images follow each other."""
    how = {"seeds": extent.seeds, "steps": extent.steps}
    virtual = [
        {"method": method, "per_class": per_class, "bits": bits, **how}
        for method in METHODS
        for per_class in PER_CLASS
        for bits in extent.bits
    ]
    real = [
        {"method": "real", "per_class": REAL_A_VIRTUAL * n, "bits": SENT_BITS, **how}
        for n in PER_CLASS
    ]
    return virtual + real


def made(train: Samples, num_classes: int, method: str, per_class: int) -> VirtualData:
    """Virtual images, or random real ones."""
    if method == "real":
        return random_real(train, num_classes, per_class)
    return distiller(method)(
        train.inputs,
        train.labels,
        num_classes=num_classes,
        per_class=per_class,
        generator=torch.Generator().manual_seed(0),
        **formation_arguments(method, 0),
    )


def measured(data: Dataset, missing: list[Row]) -> Iterator[Row]:
    """The rows with their bytes and accuracy."""
    train, test = data.train.to_samples(data.spec), data.test.to_samples(data.spec)
    images = lru_cache(1)(partial(made, train, data.spec.num_classes))
    for row in missing:
        parcel = images(row["method"], row["per_class"]).to_bytes(row["bits"])
        decoded = VirtualData.from_bytes(parcel).decoded()
        samples = Samples(decoded.images, decoded.labels)
        judge = replace(LENET, steps=row["steps"])
        scores = [
            train_and_score(judge, samples, test, data.spec, seed=seed)
            for seed in range(row["seeds"])
        ]
        yield {**row, "bytes": len(parcel), "accuracy": statistics.mean(scores)}


def plotted(rows: list[Row]) -> Figure:
    """Accuracy by bytes; a line for each method and number of bits."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    colours = {"dm": "tab:blue", "kip": "tab:orange", "kip-negatives": "tab:green", "real": "grey"}
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


def main() -> None:
    """Measure what is missing, print a table, draw the curve and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="one seed, 1,000 steps, 4 bits")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curve there")
    parser.add_argument("--json", type=Path, metavar="FILE", required=True, help="rows, kept")
    arguments = parser.parse_args()
    console, asked = Console(), cases(QUICK if arguments.quick else FULL)
    saved = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
    rows = [row for row in saved if {key: row[key] for key in asked[0]} in asked]
    known = [{key: row[key] for key in asked[0]} for row in rows]
    missing = [row for row in asked if row not in known]
    for row in measured(load_dataset("mnist", arguments.data_root), missing):
        rows.append(row)
        write_json(arguments.json, rows)
        console.print(", ".join(_cells(row)))
    table = Table("method", "bits", "images a class", "bytes", "accuracy")
    for row in rows:
        table.add_row(*_cells(row))
    console.print(table)
    if arguments.plot is not None:
        plotted(rows).savefig(arguments.plot)


def _cells(row: Row) -> list[str]:
    cells = [str(row[key]) for key in ("method", "bits", "per_class")]
    return [*cells, f"{row['bytes']:,}", f"{row['accuracy']:.3f}"]


if __name__ == "__main__":
    main()
