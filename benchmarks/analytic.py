"""One round of sums on frozen features: accuracy, bytes, and the head of pooled data beside it.

``python -m benchmarks.analytic --quick --data-root DIR [--json FILE]``

CIFAR-10, 2,000 training and 1,000 test images of 96 pixels on EfficientNet-Lite0, 20 nodes of one
class each: the run's accuracy, that of the head of all images in one place, the largest difference
between the weights of both, and the traffic through the server for each node.

``python -m benchmarks.analytic --data-root DIR [--rows cifar10 mnist ...] [--json FILE]``

The same with 128 pixels, the network's size for small images, on up to 6,000 images of CIFAR-10,
3,000 each of MNIST and MNIST-M, and four fifths of the part of Fashion-MNIST's test set in
``DIR/fashion_mnist_aux``; and from the same features heads of other settings: discriminant
analysis, a projection, and noise for differential privacy with 10 nodes of all classes.

With ``--held-out`` a fifth of the training images takes the place of the test images, for choosing
settings; with ``--set KEY=VALUE ...`` the runs have other ones; with ``--seeds 0 1 2`` there is a
run of each, and no other heads.

``python -m benchmarks.analytic --domains --data-root DIR [--held-out] [--set ...] [--seeds ...]``

A node each of MNIST, USPS and MNIST-M, up to 3,000 images as 3x32x32: accuracy by domain after one
round of sums, and after 20 rounds of FedAvg that train the head of the same frozen network.

``python -m benchmarks.analytic --started --data-root DIR [--json FILE]``

Accuracy after 20 rounds of FedAvg, HFLDD and FedLGD on digits, with random features as the frozen
network, and on 6,000 images of CIFAR-10 with EfficientNet-Lite0, all of one class a node: the
frozen network with a random head, with ``start="analytic"``, and the small `digits-cnn`, trained
from scratch. Runs that are in the JSON file are not run again.

All need the extra ``backbones``. Nodes run in this process, one after the other.
"""

import argparse
import json
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial, reduce
from itertools import product
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, RecordDict
from numpy.typing import NDArray
from rich.console import Console
from safetensors.numpy import load_file
from torch import nn

from benchmarks.figures import key_value, read_lines, write_json
from benchmarks.in_process import FIRST_NODE, run_in_process
from flwr_distill.client.features import kept_features
from flwr_distill.client.session import Session
from flwr_distill.distill.analytic import (
    Head,
    Sums,
    best_penalty,
    best_shrinkage,
    clipped,
    deviations,
    discriminant,
    noisy_penalty,
    random_directions,
    ridge,
)
from flwr_distill.task.backbones.efficientnet import at_size
from flwr_distill.task.datasets import Dataset, DataSpec, RawSamples, load_dataset
from flwr_distill.task.datasets.npz import read_npz
from flwr_distill.task.source import server_data

NODES = 20
ROWS = ("cifar10", "mnist", "mnist_m", "fashion")
QUICK_TRAIN, QUICK_TEST, QUICK_SIZE = 2000, 1000, 96
MAX_TRAIN, MAX_TEST = 6000, 1500
FEW_TRAIN, FEW_TEST = 3000, 1000
PROJECTION = 680
PRIVATE_NODES = 10
PRIVATE_PROJECTIONS = (128, 256, 512)
MULTIPLIERS = {4.0: 1.16, 1.0: 4.05}
"""Noise multiplier of one release by epsilon, at delta = 1e-5 by Opacus's RDP accountant."""
SEEDS = 3
DOMAINS = ("mnist", "usps", "mnist_m")
HELD_OUT = 5
"""One in so many training images is held out of the training of runs that choose settings."""
SMALL_NETWORK = "benchmarks.analytic:small_network"
STARTED = {
    "num-rounds": 20,
    "hfldd.auxiliary-size": 100,
    "hfldd.distill-steps": 50,
    "fedlgd.first-steps": 50,
    "fedlgd.selections": 1,
}
"""Settings of the runs with and without a start: few images and steps, since networks are slow."""


def first_of(data: Dataset, num_train: int, num_test: int) -> Dataset:
    """The first images of each class, as many of each."""

    def part(samples: RawSamples, count: int) -> RawSamples:
        each = count // data.spec.num_classes
        classes = range(data.spec.num_classes)
        rows = [np.flatnonzero(samples.labels == label)[:each] for label in classes]
        return samples.subset(np.concatenate(rows))

    return Dataset(data.spec, part(data.train, num_train), part(data.test, num_test))


def _first(name: str, num_train: int, num_test: int, root: Path, download: bool) -> Dataset:
    return first_of(load_dataset(name, root), num_train, num_test)


quick_cifar10 = partial(_first, "cifar10", QUICK_TRAIN, QUICK_TEST)
cifar10 = partial(_first, "cifar10", MAX_TRAIN, MAX_TEST)
mnist = partial(_first, "mnist", FEW_TRAIN, FEW_TEST)
mnist_m = partial(_first, "mnist-m", FEW_TRAIN, FEW_TEST)
usps = partial(_first, "usps", FEW_TRAIN, FEW_TEST)


def fashion(root: Path, download: bool) -> Dataset:
    """The part of Fashion-MNIST's test set at hand, in two."""
    spec = DataSpec("fashion-mnist", (1, 28, 28), 10, (0.2860,), (0.3530,))
    samples = read_npz(root / "fashion_mnist_aux" / "test.npz", spec)
    fifths = np.arange(len(samples)) % 5
    train, test = np.flatnonzero(fifths), np.flatnonzero(fifths == 0)
    return Dataset(spec, samples.subset(train), samples.subset(test))


def _held_out(dataset: Callable[[Path, bool], Dataset], root: Path, download: bool) -> Dataset:
    """A part of the training images in place of the test images."""
    data = dataset(root, download)
    place = np.random.default_rng(0).permutation(len(data.train)) % HELD_OUT
    train, test = (data.train.subset(np.flatnonzero(rows)) for rows in (place, place == 0))
    return Dataset(data.spec, train, test)


cifar10_held_out = partial(_held_out, cifar10)
mnist_held_out = partial(_held_out, mnist)
mnist_m_held_out = partial(_held_out, mnist_m)
usps_held_out = partial(_held_out, usps)
fashion_held_out = partial(_held_out, fashion)


def small_network(spec: DataSpec) -> nn.Module:
    """EfficientNet-Lite0 on images of 96 pixels."""
    return at_size(spec, QUICK_SIZE)


@dataclass(frozen=True, eq=False)
class Features:
    """Features and labels of all nodes' samples, and of the test set."""

    train: NDArray[np.float64]
    labels: NDArray[np.int64]
    test: NDArray[np.float64]
    test_labels: NDArray[np.int64]

    def score(self, head: Head) -> float:
        """Accuracy of a head."""
        predicted = (self.test @ head.weight.T + head.bias).argmax(1)
        return float((predicted == self.test_labels).mean())

    def sums(self, rows: slice = slice(None), directions: Any = None) -> Sums:
        """Sums over some of the samples, as a node sends them."""
        x = self.train[rows] if directions is None else self.train[rows] @ directions
        return Sums.of(clipped(x, 1.0), self.labels[rows], int(self.test_labels.max()) + 1)


def measured(config: dict[str, Any]) -> tuple[dict[str, float], Features]:
    """A run's accuracy and traffic, its head beside that of all images in one place; features."""
    with tempfile.TemporaryDirectory() as folder:
        state = str(Path(folder) / "state")
        each: dict[str, str | int] = {"num-partitions": NODES, "device": "cpu", "state-dir": state}
        start, end = run_in_process(config, [each] * NODES, Path(folder))
        weight = load_file(Path(folder) / "1" / "model.safetensors")["head.weight"]
        features = _features(config, each)
    sums = features.sums()
    pooled = ridge(sums, best_penalty(sums))
    megabytes = (end["server_bytes"] - start["server_bytes"]) / NODES / 1e6
    numbers = {
        "accuracy": end["accuracy"],
        "pooled": features.score(pooled),
        "difference": float(np.abs(weight - pooled.weight).max()),
        "megabytes_a_node": megabytes,
    }
    return numbers, features


def _features(config: dict[str, Any], node: dict[str, Any]) -> Features:
    """What nodes keep, and the same of the test set."""
    sessions = [
        Session.of(Context(1, place, {**node, "partition-id": place}, RecordDict(), config))
        for place in range(NODES)
    ]
    labels = np.concatenate([session.data.train.labels.numpy() for session in sessions])
    data = server_data(sessions[0].task)
    assert data is not None
    shown = data.test.to_samples(sessions[0].data.spec).inputs
    features = [kept_features(session, session.data.train.inputs) for session in sessions]
    return Features(
        np.concatenate(features).astype(np.float64),
        labels,
        kept_features(sessions[0], shown).astype(np.float64),
        data.test.labels,
    )


def config_of(dataset: str, data_root: Path, model: str) -> dict[str, Any]:
    """Run config of one round with nodes of one class each."""
    return {
        "dataset": f"benchmarks.analytic:{dataset}",
        "data-root": str(data_root.resolve()),
        "model": model,
        "strategy": "analytic",
        "num-rounds": 1,
        "partition.classes": 1,
        "train.holdout": 0.0,
        "server-device": "cpu",
        "phase-timeout": 36000.0,  # nodes work one after the other
    }


def other_heads(features: Features) -> Iterable[tuple[str, list[float]]]:
    """Accuracies of heads of other settings, by seed of their draws."""
    sums, width = features.sums(), features.train.shape[1]
    yield "lda", [features.score(discriminant(sums, best_shrinkage(sums)))]
    projected = []
    for seed in range(SEEDS):
        directions = random_directions(width, PROJECTION, seed)
        of_few = features.sums(directions=directions)
        head = ridge(of_few, best_penalty(of_few)).of_projection(directions)
        projected.append(features.score(head))
    yield f"projection on {PROJECTION}", projected
    for epsilon, noise in MULTIPLIERS.items():
        for k in PRIVATE_PROJECTIONS:
            scores = [private(features, k, noise, seed) for seed in range(SEEDS)]
            yield f"epsilon = {epsilon:g}, {k} directions", scores


def private(features: Features, k: int, noise: float, seed: int) -> float:
    """Accuracy of the head of nodes that add noise to their sums."""
    directions = random_directions(features.train.shape[1], k, seed)
    draws = torch.Generator().manual_seed(seed)
    nodes = (
        features.sums(slice(place, None, PRIVATE_NODES), directions).with_noise(1.0, noise, draws)
        for place in range(PRIVATE_NODES)
    )
    total = reduce(add, nodes)
    of_gram, _, _ = deviations(1.0, noise)
    head = ridge(total, noisy_penalty(k, of_gram * PRIVATE_NODES**0.5))
    return features.score(head.of_projection(directions))


def quick(data_root: Path) -> dict[str, float]:
    """The four numbers of the quick run."""
    numbers, _ = measured(config_of("quick_cifar10", data_root, SMALL_NETWORK))
    return {"cifar10_one_class": numbers.pop("accuracy"), **numbers}


def started(data_root: Path, file: Path | None, console: Console) -> None:
    """Accuracy by round, of strategies with and without the head in closed form as their start."""
    results = json.loads(file.read_text()) if file is not None and file.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        # One folder for all runs, so that features are computed once.
        state: dict[str, str | int] = {"num-partitions": NODES, "state-dir": folder}
        for (data, frozen), (label, changes), name in product(
            (
                ("digits", "random-features"),
                ("benchmarks.analytic:cifar10", "efficientnet-lite0"),
            ),
            (
                ("frozen, random head", {}),
                ("frozen, started", {"start": "analytic"}),
                ("a network of its own", {"model": "digits-cnn"}),
            ),
            ("fedavg", "hfldd", "fedlgd"),
        ):
            key = f"{data}, {name}, {label}"
            if key in results:
                continue
            config = {**config_of("", data_root, frozen), "dataset": data}
            lines = run_in_process(
                config | {**STARTED, "strategy": name, **changes}, [state] * NODES
            )
            shutil.rmtree(Path(folder) / "runs")  # all have the same id
            results[key] = [line["accuracy"] for line in lines]
            console.print(f"{key}: {results[key]}")
            write_json(file, results)


def rows(
    names: Iterable[str],
    data_root: Path,
    changes: dict[str, Any],
    seeds: list[int],
    console: Console,
) -> dict[str, Any]:
    """Numbers of each data set, by seed; without `seeds` of seed 0, and of other heads on CIFAR-10.

    `changes` are settings that differ from `config_of`.
    """
    results: dict[str, Any] = {}
    for name, seed in product(names, seeds or [0]):
        config = config_of(name, data_root, "efficientnet-lite0") | changes | {"seed": seed}
        numbers, features = measured(config)
        results[f"{name}, seed {seed}"] = numbers
        console.print(f"{name}, seed {seed}: {numbers}")
        for setting, scores in other_heads(features) if name == "cifar10" and not seeds else ():
            results[f"{name}, {setting}"] = scores
            console.print(f"{name}, {setting}: {statistics.mean(scores):.3f} {scores}")
    return results


def domains(
    names: list[str], data_root: Path, changes: dict[str, Any], seeds: list[int], console: Console
) -> dict[str, Any]:
    """Accuracy by domain and their mean, of one round of sums and of FedAvg, by seed."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        # One folder for all runs, so that features are computed once.
        nodes: list[dict[str, bool | int | float | str]] = [
            {"dataset": f"benchmarks.analytic:{name}", "state-dir": folder} for name in names
        ]
        for (strategy, rounds), seed in product((("analytic", 1), ("fedavg", 20)), seeds or [0]):
            config = config_of("", data_root, "efficientnet-lite0") | {
                "dataset": "private",
                "private.shape": "3x32x32",
                "fraction-evaluate": 1.0,
                "strategy": strategy,
                "num-rounds": rounds,
                "seed": seed,
            }
            del config["partition.classes"], config["server-device"]
            with tempfile.TemporaryDirectory() as runs:
                run_in_process(config | changes, nodes, Path(runs))
                journal = read_lines(Path(runs) / "1" / "journal.jsonl")
            last = [entry for entry in journal if entry.get("phase") == "evaluate"][-1]["nodes"]
            scores = [last[str(FIRST_NODE + place)]["eval-accuracy"] for place in range(len(names))]
            results[f"{strategy}, seed {seed}"] = scores
            console.print(f"{strategy}, seed {seed}: {statistics.mean(scores):.4f} {scores}")
    return results


def main() -> None:
    """Measure, print and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="four numbers, on CIFAR-10")
    parser.add_argument("--started", action="store_true", help="strategies that start from it")
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--domains", action="store_true", help="three domains, beside FedAvg")
    parser.add_argument("--held-out", action="store_true", help="test on training images")
    parser.add_argument("--set", nargs="+", type=key_value, default=[], metavar="KEY=VALUE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    arguments = parser.parse_args()
    console = Console()
    if arguments.quick:
        results: dict[str, Any] = quick(arguments.data_root)
        console.print(results)
    elif arguments.started:
        started(arguments.data_root, arguments.json, console)
        return
    else:
        measure, chosen = (domains, DOMAINS) if arguments.domains else (rows, arguments.rows)
        names = [f"{name}_held_out" if arguments.held_out else name for name in chosen]
        changes = dict(arguments.set)
        results = measure(names, arguments.data_root, changes, arguments.seeds, console)
    write_json(arguments.json, results)


if __name__ == "__main__":
    main()
