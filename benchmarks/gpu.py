"""Time of steps on a GPU, beside what they launch and what the hardware could do.

``python -m benchmarks.gpu [--device cuda] [--quick] [--only NAME ...] [--json FILE]``

A step of each distiller, of local training, of DP-SGD and of ensemble distillation, and whole small
federations. Steps that a GPU replays as CUDA graphs are also timed without; beside DM, KIP and
gradient matching are the steps as published (`benchmarks.distill_reference`), on the same GPU and
in turn with ours. A step's time is the difference between more steps and fewer, so that what is
done once does not count. Ours are whole steps of a distiller, with the optimiser's part; the
published ones stop at the gradient. DM's published step draws a network and processes all real
images; ours takes one of a bank, whose real images were processed before. All are in float32,
but KIP's published loop in float64.

A step has two floors. The launch floor is its kernels times what a trivial kernel costs in a CUDA
graph of this GPU. The other is what an H100 (SXM) needs for as many operations or bytes. There,
each operation of PyTorch counts with all that it reads and writes; a step whose tensors stay in the
GPU's cache can be faster than that.

Operations, bytes, launches and waits are counted by `benchmarks.virtual_device` on the CPU, in
other processes, because this patches PyTorch. On a GPU its profiler and PyTorch's warnings count
kernels and waits too, and the JSON has each step's costliest kernels and the longest gaps between
them. Goals are in `benchmarks.gpu_goals`; a missed one names its rows.

``--quick`` takes less time. On a GPU it measures fewer rows, for a shorter time; on a CPU it makes
the problems tiny, to try the program.
"""

import argparse
import functools
import multiprocessing
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.distill_cost import count, seconds
from benchmarks.distill_steps import PAPERS, TINY, Setting, Sizes
from benchmarks.figures import write_json
from benchmarks.gpu_goals import GOALS
from benchmarks.gpu_kit.machine import driver
from benchmarks.gpu_profile import (
    LaunchCosts,
    StepProfile,
    launch_costs,
    profiler_error,
    step_profile,
)
from benchmarks.gpu_work import QUICK, WORK, Steps, Work, without_graphs
from benchmarks.virtual_device import VirtualDevice
from flwr_distill.task.compute import cuda_graph
from flwr_distill.task.compute.device import choose_device
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.settings import Precision

PEAK_FLOPS: dict[Precision, float] = {"float32": 67e12, "tf32": 494e12, "bf16": 989e12}
"""FLOP/s of an H100 SXM without sparsity, by its data sheet."""
PEAK_BANDWIDTH = 3.35e12
"""Bytes/s of its memory."""
MAX_STEPS = 1024
RECORDED = 20
"""Times the first steps, after which those that a GPU replays as CUDA graphs are recorded."""
PROFILED = 10
COUNTED_REAL = 26
"""Real images a class where steps are counted: a step draws no more than 256 of ten classes."""
COUNTERS = 4


@dataclass(frozen=True)
class Effort:
    """How long to count and to measure.

    Parameters
    ----------
    count_seconds : float
        For counting all rows; what is not counted by then has no counts.
    least_steps : int
        Fewest steps of a measurement.
    steps_seconds : float
        Least time of these steps.
    way_seconds : float
        For a way to do a row's step; there are at least three measurements.
    repeats : int
        Most measurements of a way.
    """

    count_seconds: float
    least_steps: int
    steps_seconds: float
    way_seconds: float
    repeats: int


QUICK_EFFORT = Effort(25, least_steps=16, steps_seconds=0.15, way_seconds=1.2, repeats=5)
TINY_EFFORT = Effort(300, least_steps=1, steps_seconds=0.02, way_seconds=0.25, repeats=3)
FULL_EFFORT = Effort(1800, least_steps=16, steps_seconds=0.5, way_seconds=30, repeats=5)


def counted(name: str, sizes: Sizes) -> dict[str, int]:
    """Launches, waits, copies, operations and bytes of a step; run in its own process."""
    counts = []
    sizes = replace(sizes, real_per_class=min(sizes.real_per_class, COUNTED_REAL))
    with VirtualDevice() as gpu:
        run = WORK[name].prepare(Setting(torch.device("cuda"), sizes))
        for steps in (WORK[name].first, WORK[name].first + 1):
            with gpu.measured() as used:
                flop, traffic = count(functools.partial(run, steps))
            counts.append((used.launches, used.waits, used.copies, flop, traffic))
    fewer, more = counts
    names = ("launches", "waits", "copies", "flop", "bytes")
    return {key: b - a for key, a, b in zip(names, fewer, more, strict=True)}


def all_counts(
    names: Sequence[str], sizes: Sizes, within: float
) -> dict[str, dict[str, int] | BaseException]:
    """Count the rows in other processes, which have ended before anything is timed."""
    context = multiprocessing.get_context("spawn")
    processes = min(COUNTERS, len(names), os.cpu_count() or 1)
    pool = ProcessPoolExecutor(processes, context, _count_on_cpu, (processes,))
    futures = {
        name: pool.submit(counted, name, sizes)
        for name in dict.fromkeys(WORK[name].counted_as or name for name in names)
    }
    late = wait(futures.values(), within).not_done
    workers = list(pool._processes.values())
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        if late:
            worker.kill()
        worker.join()
    counts: dict[str, dict[str, int] | BaseException] = {}
    for name in names:
        future = futures[WORK[name].counted_as or name]
        if future in late:
            counts[name] = TimeoutError(f"not counted within {within:g} s")
        else:
            counts[name] = future.exception() or future.result()
    return counts


def ways_of(work: Work, setting: Setting) -> dict[str, Steps]:
    """The ways to do a step, ours first: as a CUDA graph, kernel by kernel, as published."""
    run = work.prepare(setting)
    ways = {"eager": run}
    if work.recorded and setting.device.type == "cuda":

        def eager(steps: int) -> object:
            with without_graphs():
                return run(steps)

        ways = {"graph": run, "eager": eager}
    published = work.published_steps(setting)
    return ways if published is None else ways | {"published": published}


def first_steps(work: Work, way: str) -> int:
    """Steps after which each further one costs the same."""
    if way == "published":
        return 1
    return work.first * (RECORDED if way == "graph" else 1)


def step_seconds(
    ways: Mapping[str, Steps], firsts: Mapping[str, int], device: torch.device, effort: Effort
) -> dict[str, list[float]]:
    """Seconds of a step in each way, measured in turn after a warm-up."""

    def timed(way: str, steps: int) -> float:
        return seconds(functools.partial(ways[way], firsts[way] + steps), device)

    deadline = time.monotonic() + effort.way_seconds * len(ways)
    steps = dict.fromkeys(ways, effort.least_steps)
    for way in ways:
        timed(way, 1)
        once, latest = timed(way, 0), time.monotonic() + 2 * effort.way_seconds
        # Until they take about as long as what is done once, whose time varies.
        while timed(way, steps[way]) - once < max(effort.steps_seconds, once / 2):
            if steps[way] >= MAX_STEPS or time.monotonic() > latest:
                break
            steps[way] *= 4
    times: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(effort.repeats):
        if repeat >= 3 and time.monotonic() > deadline:
            break
        for way in ways:
            times[way].append((timed(way, steps[way]) - timed(way, 0)) / steps[way])
    return times


def recording_error(run: Steps, steps: int) -> str | None:
    """Why no step is replayed as a CUDA graph, or None if some are."""
    replayed, reasons = 0, []
    replay = torch.cuda.CUDAGraph.replay

    def noting(graph: torch.cuda.CUDAGraph) -> None:
        nonlocal replayed
        replayed += 1
        replay(graph)

    with (
        mock.patch.object(torch.cuda.CUDAGraph, "replay", noting),
        mock.patch.object(cuda_graph.logger, "info", lambda text, *x: reasons.append(text % x)),
    ):
        run(steps)
    if replayed and not reasons:
        return None
    return "; ".join(reasons) or "no step was replayed as a CUDA graph"


@dataclass(frozen=True)
class Bench:
    """Measures rows on a device."""

    setting: Setting
    effort: Effort
    launch: LaunchCosts | None
    profiler: bool

    def row(self, work: Work, counts: dict[str, int] | BaseException) -> dict[str, Any]:
        """Milliseconds, counts, floors and ratios of a step, and its profile."""
        device = self.setting.device
        ways = ways_of(work, self.setting)
        firsts = {way: first_steps(work, way) for way in ways}
        row: dict[str, Any] = {}
        if "graph" in ways and (error := recording_error(ways["graph"], firsts["graph"])):
            row["not_recorded"] = error
            del ways["graph"]
        times = step_seconds(ways, firsts, device, self.effort)
        for way, found in times.items():
            milliseconds = [1e3 * s for s in found]
            row[way] = {
                "milliseconds": statistics.median(milliseconds),
                "fastest": min(milliseconds),
                "slowest": max(milliseconds),
            }
        ours = next(iter(ways))  # what is used
        row |= {"way": ours, **row[ours]}
        if "published" in ways:
            row["published_by_ours"] = row["published"]["milliseconds"] / row["milliseconds"]
        if isinstance(counts, BaseException):
            row["not_counted"] = _in_words(counts)
        else:
            row |= counts | self._hardware_floor(work, counts, row["milliseconds"])
        waits = [row["waits"]] if "waits" in row else []
        kernels = row.get("launches")
        if device.type == "cuda" and work.first:  # whole federations have no single steps
            profiles = {
                way: step_profile(ways[way], firsts[way], PROFILED, device, self.profiler)
                for way in ways
                if way in (ours, "published")
            }
            row["profile"] = {way: _numbers(profile) for way, profile in profiles.items()}
            mine = profiles[ours]
            waits += [mine.warned_waits] + ([] if mine.waits is None else [mine.waits])
            kernels = kernels if mine.kernels is None else mine.kernels
            if mine.seen is not None:
                row["costliest_kernels"] = mine.seen.costliest()
                row["longest_gaps"] = mine.seen.longest_gaps()
        if waits:
            row["most_waits"] = max(waits)
        if self.launch is not None and kernels:
            floor = kernels * self.launch.in_graph / 1e3
            row["launch_floor_milliseconds"] = floor
            if ours == "graph":
                row["graph_by_launch_floor"] = row["milliseconds"] / floor
        return row

    @staticmethod
    def _hardware_floor(
        work: Work, counts: Mapping[str, int], milliseconds: float
    ) -> dict[str, float]:
        operations = counts["flop"] / PEAK_FLOPS[work.precision]
        floor = 1e3 * max(operations, counts["bytes"] / PEAK_BANDWIDTH)
        return {"floor_milliseconds": floor, "ratio": milliseconds / floor}


def machine(device: torch.device) -> dict[str, Any]:
    """What was measured on."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "driver": driver(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def main() -> int:
    """Measure, print a line a row and write JSON; returns 1 if a row failed."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu; default: cuda")
    parser.add_argument("--quick", action="store_true", help="fewer rows; tiny problems on a CPU")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=WORK, help="rows to measure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    arguments = parser.parse_args()
    try:
        device = choose_device(arguments.device, "--device")
    except SettingsError as error:
        parser.error(f"{error}; --device cpu measures the CPU, beside the same launches and floor")

    on_gpu, quick = device.type == "cuda", arguments.quick
    names = arguments.only or (QUICK if quick else list(WORK))
    setting, effort = Setting(device), FULL_EFFORT
    if quick:  # on a CPU only to try the program
        effort = QUICK_EFFORT if on_gpu else TINY_EFFORT
        setting = Setting(device, PAPERS if on_gpu else TINY)
    report: dict[str, Any] = {"machine": machine(device), "quick": quick, "rows": {}}
    report["peak"] = {"flop_per_second": PEAK_FLOPS, "bytes_per_second": PEAK_BANDWIDTH}

    def write() -> None:
        """After each row, to keep those before one that ends the program."""
        report["goals"] = [goal.judged(report["rows"], on_gpu) for goal in GOALS]
        write_json(arguments.json, report)

    start = time.monotonic()
    _say(f"counting {len(names)} rows on the CPU, {effort.count_seconds:g} s at most")
    counts = all_counts(names, setting.sizes, effort.count_seconds)
    launch, profiler = None, False
    if on_gpu:
        launch = launch_costs(device)
        missing = profiler_error(device)
        profiler = missing is None
        report["launch_microseconds"] = launch._asdict()
        report["profiler"] = missing or "works"
        _say(f"a trivial kernel: {launch.in_graph:.2f} us in a graph, {launch.eager:.2f} eager")
        _say(f"profiler: {report['profiler']}")
    bench = Bench(setting, effort, launch, profiler)
    for name in names:
        before = time.monotonic()
        try:
            row = bench.row(WORK[name], counts[name])
        except Exception as error:
            row = {"error": _in_words(error)}
        row["seconds_to_measure"] = time.monotonic() - before
        report["rows"][name] = row
        report["seconds"] = time.monotonic() - start
        write()
        _say(f"{name}: {_line(row)}")
    for goal in report["goals"]:
        measured = "" if goal["measured"] is None else f" ({goal['measured']:.3g})"
        _say(f"goal {goal['name']}: {goal['verdict']}{measured}, {goal['bound']}")
    _say(f"{report['machine']['device']}, torch {torch.__version__}, {report['seconds']:.0f} s")
    return int(any("error" in row for row in report["rows"].values()))


def _line(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return f"failed: {row['error']}"
    parts = [
        f"{way} {row[way]['milliseconds']:.3f} ms ({row[way]['fastest']:.3f} to "
        f"{row[way]['slowest']:.3f})"
        for way in ("graph", "eager", "published")
        if way in row
    ]
    for key, words in {
        "published_by_ours": "{:.1f}x the published",
        "launches": "{} launches",
        "most_waits": "{:g} waits",
        "launch_floor_milliseconds": "launch floor {:.3f} ms",
        "floor_milliseconds": "floor {:.4f} ms",
        "not_recorded": "{}",
        "not_counted": "{}",
    }.items():
        if key in row:
            parts.append(words.format(row[key]))
    return ", ".join(parts)


def _numbers(profile: StepProfile) -> dict[str, Any]:
    names = ("kernels", "copies", "graphs", "waits", "warned_waits", "busy_milliseconds")
    return {name: getattr(profile, name) for name in names}


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _count_on_cpu(processes: int) -> None:
    """Set up a process that counts: it sees no GPU, and shares the cores with the others."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
