"""CPU time of local training, where freed memory is kept and where it is given back at once.

``python -m benchmarks.freed_memory [--repeats 3] [--json FILE]``

Nodes' workers keep it (`node.memory`). Each row is a network and a batch size; 1,500 random images
of CIFAR-10's shape, one epoch, one thread. Both ways take turns, each in a process of its own; a
row has the medians of their CPU time, the system's included.
"""

import argparse
import json
import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from client.training import train_round
from node.memory import keep_freed
from task.datasets import DataSpec, Samples
from task.models import create_model
from task.settings import TrainSettings

CASES = (("digits-cnn", 16), ("resnet8", 32), ("convnet3-gn", 64))
SPEC = DataSpec("images", (3, 32, 32), 10, (0.5,) * 3, (0.5,) * 3)
IMAGES = 1500


def seconds(model: str, batch_size: int, *, kept: bool) -> tuple[float, float]:
    """CPU seconds of an epoch, and those of them that were the system's."""
    if kept:
        keep_freed()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(IMAGES, *SPEC.shape, generator=generator)
    samples = Samples(images, torch.arange(IMAGES) % SPEC.num_classes)
    network = create_model(model, SPEC)
    settings = TrainSettings(batch_size=batch_size, local_epochs=1)
    train_round(network, samples.subset(torch.arange(batch_size)), settings, generator)  # warm up
    before = resource.getrusage(resource.RUSAGE_SELF)
    train_round(network, samples, settings, generator)
    after = resource.getrusage(resource.RUSAGE_SELF)
    system = after.ru_stime - before.ru_stime
    return after.ru_utime - before.ru_utime + system, system


def in_new_process(
    call: Callable[..., tuple[float, float]], *args: object, kept: bool
) -> list[float]:
    """What a call gives in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return list(pool.submit(call, *args, kept=kept).result())


def main() -> None:
    """Measure, print the table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    table = Table(
        "network, batch", "given back, s", "of the system", "kept, s", "of the system", "ratio"
    )
    rows = []
    for model, batch_size in CASES:
        runs: dict[bool, list[list[float]]] = {False: [], True: []}
        for _ in range(options.repeats):
            for kept, measured in runs.items():
                measured.append(in_new_process(seconds, model, batch_size, kept=kept))
        (given, given_system), (kept_all, kept_system) = (
            map(median, zip(*measured, strict=True)) for measured in runs.values()
        )
        ratio = kept_all / given
        numbers = (given, given_system, kept_all, kept_system, ratio)
        table.add_row(f"{model}, {batch_size}", *(f"{number:.2f}" for number in numbers))
        rows.append(
            {"model": model, "batch_size": batch_size, "given_back": given, "kept": kept_all}
        )
    Console().print(table)
    if options.json is not None:
        options.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
