"""Our distillation steps against plain ones (`benchmarks.distill_reference`): time and memory.

``python -m benchmarks.distill [--quick] [--threads N] [--device cuda] [--json FILE]``

Calls both in turn on the same inputs and compares median times; also measures the peak memory of a
step, and a lower bound of our time from measured FLOP/s and bytes/s. Then compares the accuracy of
networks trained on the virtual digits of both loops.

DM's row excludes building our bank, done once; the reference draws its network and processes real
images every step, as published.
"""

import argparse
import functools
import itertools
import json
import multiprocessing
import os
import platform
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks import distill_reference
from benchmarks.distill_accuracy import accuracies
from benchmarks.distill_cost import Step, count, peak_bytes, peak_rates, seconds
from distill.augmentation import draw_augmentation
from distill.distribution_matching import Probe, real_means
from distill.features import RandomConvNet
from distill.kip import kip_gradient
from distill.ntk import DEPTH

CLASSES = 10
PER_CLASS = 10
REAL_PER_CLASS = 256
WIDTH = 128
CIFAR = (3, 32, 32)
QUICK_STEPS, FULL_STEPS = 60, 400
KipProblem = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Setting:
    """What all rows share; `quick` means fewer repeats, classes and steps."""

    device: str
    threads: int
    quick: bool

    def generator(self) -> torch.Generator:
        """Generator of a row's inputs."""
        return torch.Generator().manual_seed(0)


@dataclass(frozen=True)
class Comparison:
    """Two ways to do the same step."""

    reference: Step
    ours: Step
    repeats: int


def kip_problem(
    shape: tuple[int, ...], targets: int, generator: torch.Generator, device: str
) -> KipProblem:
    """Draw virtual points (..., n, d), `targets` real ones, and labels."""
    *batch, n, d = shape
    sizes = [(n, d), (n, CLASSES), (targets, d), (targets, CLASSES)]
    virtual, y_s, real, y_t = (
        torch.randn(*batch, *s, generator=generator).to(device) for s in sizes
    )
    return virtual, y_s, real, y_t


def in_float64(problem: KipProblem) -> KipProblem:
    """The same problem in double precision."""
    virtual, y_s, real, y_t = (x.double() for x in problem)
    return virtual, y_s, real, y_t


def kip_large(setting: Setting, dtype: torch.dtype) -> Comparison:
    """400 virtual and 256 real points of 3072 pixels, against the naive step in `dtype`."""
    large = kip_problem((400, 3072), 256, setting.generator(), setting.device)
    naive = in_float64(large) if dtype == torch.float64 else large
    return Comparison(
        lambda: distill_reference.kip_gradient(*naive, depth=DEPTH),
        lambda: kip_gradient(*large),
        repeats=40,
    )


def kip_clients(setting: Setting) -> Comparison:
    """Ten clients of ten points in one batch, against one by one in float64."""
    clients = kip_problem((10, 10, 3072), 10, setting.generator(), setting.device)
    singles = [in_float64((a, b, c, d)) for a, b, c, d in zip(*clients, strict=True)]
    return Comparison(
        lambda: [distill_reference.kip_gradient(*one, depth=DEPTH) for one in singles],
        lambda: kip_gradient(*clients),
        repeats=200,
    )


def images(
    setting: Setting, classes: int, generator: torch.Generator
) -> tuple[list[Tensor], Tensor]:
    """Draw real images of each class, and virtual ones (classes, per_class, C, H, W)."""
    real = [
        torch.randn(REAL_PER_CLASS, *CIFAR, generator=generator).to(setting.device)
        for _ in range(classes)
    ]
    virtual = torch.randn(classes, PER_CLASS, *CIFAR, generator=generator).to(setting.device)
    return real, virtual


def draw_probe(virtual: Tensor, generator: torch.Generator) -> Probe:
    """Draw a network and augmentation, with arbitrary class means."""
    network = RandomConvNet.draw(CIFAR[0], CIFAR[1], WIDTH, generator, virtual.device)
    augment = draw_augmentation(*CIFAR[1:], generator)
    means = real_means(network, augment, virtual[:, 0], [1] * len(virtual))
    return Probe(network, augment, means)


def dm(setting: Setting) -> Comparison:
    """All ten classes, with a bank of five."""
    generator = setting.generator()
    real, virtual = images(setting, CLASSES, generator)
    bank = itertools.cycle([draw_probe(virtual, generator) for _ in range(5)])

    def reference() -> list[Tensor]:
        augment = draw_augmentation(*CIFAR[1:], generator)
        return distill_reference.dm_step(real, list(virtual), augment, WIDTH)

    return Comparison(reference, lambda: next(bank).loss_and_gradient(virtual), repeats=10)


ROWS: dict[str, Callable[[Setting], Comparison]] = {
    "kip_n400_vs_float64": functools.partial(kip_large, dtype=torch.float64),
    "kip_n400_vs_float32": functools.partial(kip_large, dtype=torch.float32),
    "kip_batched_10x10": kip_clients,
    "dm_w128_float32": dm,
}


def times(setting: Setting, comparison: Comparison) -> tuple[float, float]:
    """Median seconds of the reference and of ours, called in turn, after a warm-up each."""
    repeats = max(3, comparison.repeats // 5) if setting.quick else comparison.repeats
    device = torch.device(setting.device)
    both = [
        (seconds(comparison.reference, device), seconds(comparison.ours, device))
        for _ in range(1 + repeats)
    ]
    reference, ours = zip(*both[1:], strict=True)
    return statistics.median(reference), statistics.median(ours)


def memory(setting: Setting, name: str) -> tuple[int, int]:
    """Peak bytes of a step of the reference and of ours; run in its own process."""
    torch.set_num_threads(setting.threads)
    comparison, device = ROWS[name](setting), torch.device(setting.device)
    return peak_bytes(comparison.reference, device), peak_bytes(comparison.ours, device)


def start_process() -> ProcessPoolExecutor:
    """Start the process to measure memory in, which returns freed memory at once."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def main() -> None:
    """Run all rows, print tables and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, within 5 minutes")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu", help="where to compute, such as cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    arguments = parser.parse_args()
    setting = Setting(arguments.device, arguments.threads, arguments.quick)
    device = torch.device(setting.device)
    torch.set_num_threads(setting.threads)
    torch.manual_seed(0)

    console = Console()
    steps = Table("step", "reference [ms]", "ours [ms]", "ratio", "at peak [ms]", "memory [MB]")
    ratios, rows = {}, {}
    process = start_process()
    for name in ROWS:
        with console.status(f"{name}: both in turn"):
            comparison = ROWS[name](setting)
            reference, ours = times(setting, comparison)
            operations, traffic = count(comparison.ours)
            rate, bandwidth = peak_rates(device)
            at_peak = {"flop": operations / rate, "bytes": traffic / bandwidth}
            peaks = process.submit(memory, setting, name).result()
            del comparison
        ratios[name] = reference / ours
        rows[name] = {
            "seconds": {"reference": reference, "ours": ours},
            "peak_bytes": {"reference": peaks[0], "ours": peaks[1]},
            "ours": {"flop": operations, "bytes": traffic, "seconds_at_peak": at_peak},
        }
        steps.add_row(
            name,
            *(f"{1e3 * x:.2f}" for x in (reference, ours)),
            f"{reference / ours:.1f}x",
            " / ".join(f"{1e3 * x:.2f}" for x in at_peak.values()),
            " / ".join(f"{x / 1e6:.0f}" for x in peaks),
        )
    process.shutdown()
    console.print(steps)

    scores = Table("accuracy on digits", "steps", "reference", "ours")
    updates = QUICK_STEPS if setting.quick else FULL_STEPS
    with console.status(f"dm: {updates} steps of both"):
        reference, ours = accuracies(updates, WIDTH, device)
    accuracy = {"dm": {"steps": updates, "reference": reference, "ours": ours}}
    scores.add_row("dm", str(updates), f"{reference:.3f}", f"{ours:.3f}")
    console.print(scores)
    if arguments.json is not None:
        machine = {
            "processor": platform.processor() or platform.machine(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
        report = {"ratios": ratios, "rows": rows, "accuracy": accuracy, "machine": machine}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
