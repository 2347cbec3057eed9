"""Our distillation steps against plain ones (`benchmarks.distill_reference`): time and memory.

``python -m benchmarks.distill [--quick] [--threads N] [--device cuda] [--json FILE]``

Calls both in turn on the same inputs and compares median times; also measures the peak memory of a
step, and a lower bound of our time from measured FLOP/s and bytes/s. Then compares the accuracy of
networks trained on the virtual digits of both loops.

DM's row excludes building our bank, done once; the reference draws its network and processes real
images every step, as published. Gradient matching's row includes our copy of the model.
"""

import argparse
import multiprocessing
import os
import platform
import statistics
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.distill_accuracy import accuracies
from benchmarks.distill_cost import count, peak_bytes, peak_rates, seconds
from benchmarks.distill_steps import PAPERS, ROWS, Comparison, Setting
from benchmarks.figures import write_json

QUICK_STEPS, FULL_STEPS = 60, 400


def times(comparison: Comparison, device: torch.device, quick: bool) -> tuple[float, float]:
    """Median seconds of the reference and of ours, called in turn, after a warm-up each."""
    repeats = max(3, comparison.repeats // 5) if quick else comparison.repeats
    both = [
        (seconds(comparison.reference, device), seconds(comparison.ours, device))
        for _ in range(1 + repeats)
    ]
    reference, ours = zip(*both[1:], strict=True)
    return statistics.median(reference), statistics.median(ours)


def memory(name: str, device: torch.device, threads: int) -> tuple[int, int]:
    """Peak bytes of a step of the reference and of ours; run in its own process."""
    torch.set_num_threads(threads)
    comparison = ROWS[name](Setting(device))
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
    device = torch.device(arguments.device)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)

    console = Console()
    steps = Table("step", "reference [ms]", "ours [ms]", "ratio", "at peak [ms]", "memory [MB]")
    ratios, rows = {}, {}
    process = start_process()
    for name in ROWS:
        with console.status(f"{name}: both in turn"):
            comparison = ROWS[name](Setting(device))
            reference, ours = times(comparison, device, arguments.quick)
            operations, traffic = count(comparison.ours)
            rate, bandwidth = peak_rates(device)
            at_peak = {"flop": operations / rate, "bytes": traffic / bandwidth}
            peaks = process.submit(memory, name, device, arguments.threads).result()
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
    updates = QUICK_STEPS if arguments.quick else FULL_STEPS
    with console.status(f"dm: {updates} steps of both"):
        reference, ours = accuracies(updates, PAPERS.width, device)
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
        write_json(arguments.json, report)


if __name__ == "__main__":
    main()
