"""Time and memory of distilling images from 28 to 224 pixels a side.

``python -m benchmarks.sizes [--sizes 28 32 64 128 224] [--real N] [--formation N] [--steps N]
[--json FILE]``

Noise in colour, since time and memory do not depend on what images show: ten classes, 10 virtual
images of each, by distribution matching with its own settings on the CPU, each size in a process of
its own. The seconds are those of a whole distillation, forecast from two steps with two networks
(`distill.forecast`). The memory is the most that the process had: PyTorch, the real images, a
distillation of few steps from start to end with half as many networks, its privacy card and
packing.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.figures import write_json
from flwr_distill.distill import distill_dm
from flwr_distill.distill.forecast import forecast

SIZES = (28, 32, 64, 128, 224)
CLASSES, PER_CLASS = 10, 10
REAL = 100
HELD_BACK = 10


def measured(side: int, real: int, formation: int, steps: int) -> dict[str, Any]:
    """Seconds and peak bytes of images of one size; in this process, which should be fresh."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(CLASSES * real, 3, side, side, generator=generator)
    labels = torch.arange(CLASSES).repeat_interleave(real)
    asked: dict[str, Any] = {
        "num_classes": CLASSES,
        "per_class": PER_CLASS,
        "formation": formation,
        "generator": generator,
    }
    expected = forecast("dm", images, labels, device=torch.device("cpu"), **asked)
    virtual = distill_dm(images, labels, steps=steps, bank=max(1, steps // 2), **asked)
    distilling = _most_memory()
    begin = time.perf_counter()
    virtual.with_card(images, images[:HELD_BACK]).to_bytes(bits=4)
    return {
        "side": side,
        "seconds": expected.seconds,
        "memory_distilling": distilling,
        "seconds_after": time.perf_counter() - begin,
        "memory": _most_memory(),
        "real_images": images.nbytes,
    }


def _most_memory() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def exponent(rows: list[dict[str, Any]], key: str) -> float:
    """Of the side, by least squares over the logarithms."""
    sides, values = (np.log([row[name] for row in rows]) for name in ("side", key))
    return float(np.polyfit(sides, values, 1)[0])


def main() -> None:
    """Measure each size in a fresh process, print a table with the exponents and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--real", type=int, default=REAL, help="real images a class")
    parser.add_argument("--formation", type=int, default=0, help="0: what the method chooses")
    parser.add_argument("--steps", type=int, default=4, help="done to the end, for the memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--here", action="store_true", help="measure one size in this process")
    arguments = parser.parse_args()
    if arguments.here:
        (side,) = arguments.sizes
        row = measured(side, arguments.real, arguments.formation, arguments.steps)
        print(json.dumps(row))
        return
    console = Console()
    table = Table("side", "hours", "GB, distilling", "GB, all", "GB, real images")
    rows: list[dict[str, Any]] = []
    for side in arguments.sizes:
        command = [sys.executable, "-m", "benchmarks.sizes", "--here", "--sizes", str(side)]
        command += ["--real", str(arguments.real), "--formation", str(arguments.formation)]
        command += ["--steps", str(arguments.steps)]
        answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        row = json.loads(answer)
        rows.append(row)
        sizes = (row[key] / 1e9 for key in ("memory_distilling", "memory", "real_images"))
        cells = [str(side), f"{row['seconds'] / 3600:.3f}", *(f"{size:.2f}" for size in sizes)]
        table.add_row(*cells)
        console.print(", ".join(cells))
        write_json(arguments.json, rows)
    console.print(table)
    if len(rows) > 1:
        console.print(f"seconds grow with the side to the power of {exponent(rows, 'seconds'):.2f}")


if __name__ == "__main__":
    main()
