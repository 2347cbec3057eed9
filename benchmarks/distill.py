"""Our distillation steps against plain ones, interleaved in one run.

Usage: ``python -m benchmarks.distill [--quick] [--threads N] [--json FILE]``. Each row times a
step as the papers' formulas read (`benchmarks.distill_reference`) and ours on the same inputs,
in turn, and compares medians of wall-clock time. DM's row is the steady state: our bank, which
is built once, is not in it, and the reference draws its network and passes its real images each
step, as published.
"""

import argparse
import functools
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks import distill_reference
from distill.augmentation import draw_augmentation
from distill.distribution_matching import Probe, real_means
from distill.features import RandomConvNet
from distill.kernels import relu_ntk
from distill.kip import kip_gradient

DEPTH = 3
CLASSES = 10
WIDTH = 128
CIFAR = (3, 32, 32)
KipProblem = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Comparison:
    """Two ways to do the same step.

    Parameters
    ----------
    name : str
        Key in the report.
    reference, ours : Callable[[], object]
        The step; called often.
    repeats : int
        Timed calls of each in a full run.
    """

    name: str
    reference: Callable[[], object]
    ours: Callable[[], object]
    repeats: int

    def run(self, repeats: int) -> tuple[float, float]:
        """Return the median seconds of the reference and of ours, after one warm-up each."""
        self.reference()
        self.ours()
        times = [(_seconds(self.reference), _seconds(self.ours)) for _ in range(repeats)]
        return statistics.median(r for r, _ in times), statistics.median(o for _, o in times)


def kip_problem(shape: tuple[int, ...], targets: int, generator: torch.Generator) -> KipProblem:
    """Draw virtual points of a shape (..., n, d), as many real ones as `targets`, and labels."""
    *batch, n, d = shape
    sizes = [(n, d), (n, CLASSES), (targets, d), (targets, CLASSES)]
    virtual, y_s, real, y_t = (torch.randn(*batch, *s, generator=generator) for s in sizes)
    return virtual, y_s, real, y_t


def in_float64(problem: KipProblem) -> KipProblem:
    """Return the same problem in double precision."""
    virtual, y_s, real, y_t = (x.double() for x in problem)
    return virtual, y_s, real, y_t


def draw_probe(virtual: Tensor, generator: torch.Generator) -> Probe:
    """Draw a network and augmentation; what the class means are does not matter to the time."""
    network = RandomConvNet.draw(CIFAR[0], CIFAR[1], WIDTH, generator)
    augment = draw_augmentation(*CIFAR[1:], generator)
    means = real_means(network, augment, virtual[:, 0], [1] * len(virtual))
    return Probe(network, augment, means)


def comparisons(generator: torch.Generator) -> list[Comparison]:
    """Set every row up; sizes as in the papers where these name them."""
    kernel = functools.partial(relu_ntk, depth=DEPTH)
    large = kip_problem((400, 3072), 256, generator)
    large_double = in_float64(large)
    clients = kip_problem((10, 10, 3072), 10, generator)
    singles = [in_float64((a, b, c, d)) for a, b, c, d in zip(*clients, strict=True)]

    real = [torch.randn(256, *CIFAR, generator=generator) for _ in range(CLASSES)]
    virtual = torch.randn(CLASSES, 10, *CIFAR, generator=generator)
    bank = itertools.cycle([draw_probe(virtual, generator) for _ in range(5)])

    def dm_reference() -> list[Tensor]:
        augment = draw_augmentation(*CIFAR[1:], generator)
        return distill_reference.dm_step(real, list(virtual), augment, WIDTH)

    return [
        Comparison(
            "kip_n400_vs_float64",
            lambda: distill_reference.kip_gradient(*large_double, depth=DEPTH),
            lambda: kip_gradient(*large, kernel=kernel),
            repeats=40,
        ),
        Comparison(
            "kip_n400_vs_float32",
            lambda: distill_reference.kip_gradient(*large, depth=DEPTH),
            lambda: kip_gradient(*large, kernel=kernel),
            repeats=40,
        ),
        Comparison(
            "kip_batched_10x10",
            lambda: [distill_reference.kip_gradient(*one, depth=DEPTH) for one in singles],
            lambda: kip_gradient(*clients, kernel=kernel),
            repeats=200,
        ),
        Comparison(
            "dm_w128_float32",
            dm_reference,
            lambda: next(bank).loss_and_gradient(virtual),
            repeats=10,
        ),
    ]


def main() -> None:
    """Run all rows, print them as a table and, where asked, write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a fifth of the repeats")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)

    console = Console()
    table = Table("step", "reference [ms]", "ours [ms]", "ratio")
    ratios, seconds = {}, {}
    for comparison in comparisons(torch.Generator().manual_seed(0)):
        repeats = max(3, comparison.repeats // 5) if arguments.quick else comparison.repeats
        with console.status(f"{comparison.name}: {repeats} of each, in turn"):
            reference, ours = comparison.run(repeats)
        ratios[comparison.name] = reference / ours
        seconds[comparison.name] = {"reference": reference, "ours": ours}
        cells = (f"{1e3 * reference:.2f}", f"{1e3 * ours:.2f}", f"{reference / ours:.1f}x")
        table.add_row(comparison.name, *cells)
    console.print(table)
    if arguments.json is not None:
        machine = {
            "processor": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
        report = {"ratios": ratios, "seconds": seconds, "machine": machine}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


def _seconds(step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
