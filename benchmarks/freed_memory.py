"""CPU time of training and evaluating, where freed memory is kept and where it is given back.

``python -m benchmarks.freed_memory [--repeats 3] [--json FILE]``

Nodes' workers, ServerApps and simulations keep it (`node.kernel`). Each row is a network with 1,500
random images of CIFAR-10's shape and one thread: an epoch with a batch size, or an evaluation. Both
ways take turns, each in a process of its own; a row has the medians of their CPU time, the system's
included.
"""

import argparse
import resource
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.figures import write_json
from flwr_distill.client.training import train_round
from flwr_distill.node.kernel import keep_freed
from flwr_distill.task.datasets import DataSpec, Samples
from flwr_distill.task.evaluation import outputs
from flwr_distill.task.models import create_model
from flwr_distill.task.settings import TrainSettings

NETWORKS = {"digits-cnn": 16, "resnet8": 32, "convnet3-gn": 64}
"""Batch size of each in training."""
SPEC = DataSpec("images", (3, 32, 32), 10, (0.5,) * 3, (0.5,) * 3)
IMAGES = 1500


def seconds(model: str, work: str, *, kept: bool) -> tuple[float, float]:
    """CPU seconds of some work, and those of them that were the system's."""
    if kept:
        keep_freed()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(IMAGES, *SPEC.shape, generator=generator)
    samples = Samples(images, torch.arange(IMAGES) % SPEC.num_classes)
    network = create_model(model, SPEC)
    settings = TrainSettings(batch_size=NETWORKS[model], local_epochs=1)

    def do(samples: Samples) -> None:
        if work == "train":
            train_round(network, samples, settings, generator)
        else:
            outputs(network.eval(), samples.inputs, torch.device("cpu"))

    do(samples.subset(torch.arange(settings.batch_size)))  # warm up
    before = resource.getrusage(resource.RUSAGE_SELF)
    do(samples)
    after = resource.getrusage(resource.RUSAGE_SELF)
    system = after.ru_stime - before.ru_stime
    return after.ru_utime - before.ru_utime + system, system


def main() -> None:
    """Measure, print the table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    table = Table("work", "network", "given back, s", "system's", "kept, s", "system's", "ratio")
    rows = []
    for work, model in product(("train", "evaluate"), NETWORKS):
        runs: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for _ in range(options.repeats):
            for kept, measured in runs.items():
                with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                    run = pool.submit(seconds, model, work, kept=kept)
                    measured.append(run.result())
        given, kept_all = (tuple(map(median, zip(*own, strict=True))) for own in runs.values())
        ratio = kept_all[0] / given[0]
        numbers = (*given, *kept_all, ratio)
        table.add_row(work, model, *(f"{number:.2f}" for number in numbers))
        case = {"work": work, "model": model}
        rows.append({**case, "given_back": given, "kept": kept_all, "ratio": ratio})
    Console().print(table)
    write_json(options.json, {"rows": rows})


if __name__ == "__main__":
    main()
