"""Time of steps on a GPU, beside what they launch and what the hardware could do.

``python -m benchmarks.gpu [--device cuda] [--quick] [--only NAME ...] [--json FILE]``

A step of each distiller, of local training, of DP-SGD and of ensemble distillation, and whole small
federations. A step's time is the difference between more steps and fewer, so that what is done once
does not count.

Launches and waits are counted by `benchmarks.virtual_device`, operations and bytes by
`benchmarks.distill_cost`, all on the CPU of another process, because this patches PyTorch. The
floor is what an H100 (SXM) needs for as many operations or bytes, whichever is longer. Each
operation of PyTorch counts with all that it reads and writes; a step whose tensors stay in the
GPU's cache can be faster than that.
"""

import argparse
import functools
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from benchmarks.distill_cost import count, seconds
from benchmarks.in_process import Node, Settings, run_in_process
from benchmarks.virtual_device import VirtualDevice
from client.dp_sgd import PrivacyAccount, PrivateTraining
from client.training import fit
from distill import VirtualData, distill_dm
from distill.ensemble import HELD_OUT, distil_ensemble
from distill.registry import _DISTILLERS
from links.store import NodeStore
from task.compute.device import choose_device
from task.compute.precision import products_in
from task.datasets import DataSpec, Samples
from task.models import create_model
from task.settings import Precision, SettingsError

PEAK_FLOPS: dict[Precision, float] = {"float32": 67e12, "tf32": 494e12, "bf16": 989e12}
"""FLOP/s of an H100 SXM without sparsity, by its data sheet."""
PEAK_BANDWIDTH = 3.35e12
"""Bytes/s of its memory."""
DRIVER_FILE = Path("/proc/driver/nvidia/version")
CLASSES = 10
MOST_STEPS = 256
RECORDED = 20
"""Times the first steps, after which those that a GPU replays as CUDA graphs are recorded."""
PRIVATE_BATCH = ENSEMBLE_BATCH = 128
Steps = Callable[[int], object]
"""Does so many steps."""


@dataclass(frozen=True)
class Setting:
    """Where to compute; `quick` means small images, few samples and short measurements."""

    device: torch.device
    quick: bool

    @property
    def spec(self) -> DataSpec:
        """Images of ten classes, 32x32x3, or 8x8x3 if quick."""
        side = 8 if self.quick else 32
        return DataSpec("random", (3, side, side), CLASSES, (0.0,) * 3, (1.0,) * 3)

    def samples(self, n: int) -> Samples:
        """Draw `n` images on the device, and labels in turn."""
        images = torch.randn(n, *self.spec.shape, generator=_generator())
        return Samples(images.to(self.device), (torch.arange(n) % CLASSES).to(self.device))


@dataclass(frozen=True)
class Work:
    """A piece of work to measure.

    Parameters
    ----------
    prepare : callable
        Makes what does its steps in a setting.
    first : int (default: 1)
        Steps after which each further one costs the same.
    precision : str (default: "float32")
        Whose peak its floor is taken from.
    """

    prepare: Callable[[Setting], Steps]
    first: int = 1
    precision: Precision = "float32"


def distilling(setting: Setting, method: Callable[..., VirtualData]) -> Steps:
    """Ten virtual images a class, of 256 real ones."""
    per_class, real = (2, 8) if setting.quick else (10, 256)
    data = setting.samples(CLASSES * real)
    return lambda steps: method(
        data.inputs,
        data.labels,
        num_classes=CLASSES,
        per_class=per_class,
        steps=steps,
        generator=_generator(),
        device=setting.device,
    )


def training(setting: Setting, model_name: str, batch: int, precision: Precision) -> Steps:
    """Local training on one minibatch again and again."""
    model = create_model(model_name, setting.spec, seed=0).to(setting.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = setting.samples(batch)
    minibatch = torch.arange(batch, device=setting.device)

    def run(steps: int) -> None:
        with products_in(precision):
            fit(model, data, [minibatch] * steps, optimizer, precision=precision)

    return run


def private_training(setting: Setting) -> Steps:
    """DP-SGD with each sample in each step, so that steps are of one size."""
    model = create_model("convnet3", setting.spec, seed=0).to(setting.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = setting.samples(PRIVATE_BATCH)

    def run(steps: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            account = PrivacyAccount(NodeStore(Path(folder)), delta=1e-5, budget=0.0)
            privacy = PrivateTraining(1.0, 1.0, account, _generator())
            privacy.fit(model, data, optimizer, batch_size=PRIVATE_BATCH, steps=steps)

    return run


def ensemble_distilling(setting: Setting) -> Steps:
    """One epoch; a step has its share of the samples that are held out, too."""
    student = create_model("convnet3", setting.spec, seed=0).to(setting.device)
    inputs = setting.samples(round(ENSEMBLE_BATCH / (1 - HELD_OUT))).inputs
    teacher = torch.full((len(inputs), CLASSES), 1 / CLASSES, device=setting.device)

    def run(steps: int) -> None:
        distil_ensemble(
            student,
            _repeated(inputs, steps),
            _repeated(teacher, steps),
            epochs=1,
            batch_size=ENSEMBLE_BATCH,
            generator=_generator(),
        )

    return run


def federation(setting: Setting, strategy: str) -> Steps:
    """Server and nodes in one process, on digits; a step is a whole run."""
    nodes, rounds, steps = (2, 1, 2) if setting.quick else (10, 3, 50)
    run_config: Settings = {
        "strategy": strategy,
        "num-rounds": rounds,
        "hfldd.distilled-size": 10,
        "hfldd.distill-steps": steps,
        "server-device": str(setting.device),
    }
    node: Settings = {"num-partitions": 10, "device": str(setting.device)}

    def run(times: int) -> None:
        failures: list[Exception] = []
        for _ in range(times):
            run_in_process(run_config, [node] * nodes, wrap=functools.partial(_noting, failures))
        if failures:  # a run goes on without a node that fails
            raise failures[0]

    return run


def all_work() -> dict[str, Work]:
    """All that can be measured, by name."""
    methods: dict[str, Callable[..., VirtualData]] = {**_DISTILLERS}
    del methods["auto"]  # takes one of the others
    methods["dm"] = functools.partial(distill_dm, bank=2)  # complete after two steps
    work = {
        f"distil-{name}": Work(functools.partial(distilling, method=method), first=2)
        for name, method in sorted(methods.items())
    }
    models, batches = ("digits-cnn", "convnet3", "resnet18"), (16, 128)
    for name, batch, precision in itertools.product(models, batches, PEAK_FLOPS):
        prepare = functools.partial(training, model_name=name, batch=batch, precision=precision)
        work[f"train-{name}-{batch}-{precision}"] = Work(prepare, precision=precision)
    work["train-privately"] = Work(private_training)
    work["distil-ensemble"] = Work(ensemble_distilling)
    for strategy in ("fedavg", "hfldd"):
        work[f"run-{strategy}"] = Work(functools.partial(federation, strategy=strategy), first=0)
    return work


WORK = all_work()


def counted(name: str, quick: bool) -> dict[str, int]:
    """Launches, waits, copies, operations and bytes of a step; run in its own process."""
    counts = []
    with VirtualDevice() as gpu:
        run = WORK[name].prepare(Setting(torch.device("cuda"), quick))
        for steps in (WORK[name].first, WORK[name].first + 1):
            with gpu.measured() as used:
                flop, traffic = count(functools.partial(run, steps))
            counts.append((used.launches, used.waits, used.copies, flop, traffic))
    fewer, more = counts
    names = ("launches", "waits", "copies", "flop", "bytes")
    return {key: b - a for key, a, b in zip(names, fewer, more, strict=True)}


def step_seconds(setting: Setting, work: Work) -> list[float]:
    """Seconds of a step, measured a few times after a warm-up."""
    long_enough, repeats = (0.02, 3) if setting.quick else (0.5, 5)
    run = work.prepare(setting)

    first = RECORDED * work.first if setting.device.type == "cuda" else work.first

    def timed(steps: int) -> float:
        return seconds(functools.partial(run, first + steps), setting.device)

    timed(1)
    once, steps = timed(0), 1
    while steps < MOST_STEPS and timed(steps) - once < max(long_enough, once):
        steps *= 2  # until they take longer than what is done once
    return [(timed(steps) - timed(0)) / steps for _ in range(repeats)]


def measure(name: str, setting: Setting, counter: ProcessPoolExecutor) -> dict[str, Any]:
    """Milliseconds and counts of a step, its floor, and the ratio of the two."""
    counts = counter.submit(counted, name, setting.quick).result()
    times = [1e3 * s for s in step_seconds(setting, WORK[name])]
    median = statistics.median(times)
    operations = counts["flop"] / PEAK_FLOPS[WORK[name].precision]
    floor = 1e3 * max(operations, counts["bytes"] / PEAK_BANDWIDTH)
    return {
        "milliseconds": median,
        "fastest": min(times),
        "slowest": max(times),
        **counts,
        "floor_milliseconds": floor,
        "ratio": median / floor,
    }


def machine(device: torch.device) -> dict[str, Any]:
    """What was measured on."""
    driver = DRIVER_FILE.read_text().partition("\n")[0] if DRIVER_FILE.exists() else None
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "driver": driver,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    """Measure, print a table and write JSON."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu; default: cuda")
    parser.add_argument("--quick", action="store_true", help="small images, short measurements")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=WORK, default=list(WORK))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    arguments = parser.parse_args()
    try:
        device = choose_device(arguments.device, "--device")
    except SettingsError as error:
        parser.error(f"{error}; --device cpu measures the CPU, beside the same launches and floor")

    setting = Setting(device, arguments.quick)
    report: dict[str, Any] = {"machine": machine(device), "quick": arguments.quick}
    report["peak"] = {"flop_per_second": PEAK_FLOPS, "bytes_per_second": PEAK_BANDWIDTH}
    report["rows"] = {}
    console = Console()
    name_column = Column("step", no_wrap=True)
    table = Table(name_column, "ms (min to max)", "launches", "waits", "floor [ms]", "ratio")
    with _counter() as counter:
        for name in arguments.only:
            with console.status(name):
                row = report["rows"][name] = measure(name, setting, counter)
            table.add_row(
                name,
                f"{row['milliseconds']:.2f} ({row['fastest']:.2f} to {row['slowest']:.2f})",
                *(str(row[key]) for key in ("launches", "waits")),
                f"{row['floor_milliseconds']:.4f}",
                f"{row['ratio']:.0f}",
            )
            if arguments.json is not None:  # after each row, to keep those before one that fails
                arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    console.print(f"{report['machine']['device']}, torch {torch.__version__}")
    console.print(table)


def _counter() -> ProcessPoolExecutor:
    """Process to count in, which sees no GPU."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=context, initializer=_hide_gpus)


def _hide_gpus() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _noting(failures: list[Exception], place: int, node: Node) -> Node:
    """A node that also notes its failures."""

    def answer(message: Any) -> Any:
        try:
            return node(message)
        except Exception as error:
            failures.append(error)
            raise

    return answer


def _repeated(rows: Tensor, times: int) -> Tensor:
    return rows.repeat(times, *(1,) * (rows.ndim - 1))


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


if __name__ == "__main__":
    main()
