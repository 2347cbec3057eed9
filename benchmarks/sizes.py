"""Time and memory of distilling images from 28 to 224 pixels a side.

``python -m benchmarks.sizes [--sizes 28 32 64 128 224] [--real N] [--formation N] [--json FILE]``

Noise in colour, since time and memory do not depend on what images show: ten classes, 10 virtual
images of each, by distribution matching with its own settings on the CPU, each size in a process of
its own. Two networks are drawn and two steps are done; the seconds are those of a whole
distillation (`distill.forecast`). The memory is the most that the process had: PyTorch, the real
images, distilling, and then the privacy card and packing.
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

from distill import VirtualData
from distill.forecast import forecast
from distill.formation import best_formation

SIZES = (28, 32, 64, 128, 224)
CLASSES, PER_CLASS = 10, 10
REAL = 100
HELD_BACK = 10


def measured(side: int, real: int, formation: int) -> dict[str, Any]:
    """Seconds and peak bytes of images of one size; in this process, which should be fresh."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(CLASSES * real, 3, side, side, generator=generator)
    labels = torch.arange(CLASSES).repeat_interleave(real)
    expected = forecast(
        "dm",
        images,
        labels,
        device=torch.device("cpu"),
        num_classes=CLASSES,
        per_class=PER_CLASS,
        formation=formation,
        generator=generator,
    )
    begin = time.perf_counter()
    made = VirtualData(
        images=torch.randn(CLASSES * PER_CLASS, 3, side, side, generator=generator),
        labels=torch.arange(CLASSES).repeat_interleave(PER_CLASS),
        method="noise",
        steps=0,
        seed=0,
        init="noise",
        formation=formation or best_formation(images.shape),
    )
    made.with_card(images, images[:HELD_BACK]).to_bytes(bits=4)
    return {
        "side": side,
        "seconds": expected.seconds,
        "memory_distilling": expected.memory,
        "seconds_after": time.perf_counter() - begin,
        "memory": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "real_images": images.nbytes,
    }


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
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--here", action="store_true", help="measure one size in this process")
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(measured(arguments.sizes[0], arguments.real, arguments.formation)))
        return
    console = Console()
    table = Table("side", "hours", "GB, distilling", "GB, all", "GB, real images")
    rows: list[dict[str, Any]] = []
    for side in arguments.sizes:
        command = [sys.executable, "-m", "benchmarks.sizes", "--here", "--sizes", str(side)]
        command += ["--real", str(arguments.real), "--formation", str(arguments.formation)]
        answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        row = json.loads(answer)
        rows.append(row)
        sizes = (row[key] / 1e9 for key in ("memory_distilling", "memory", "real_images"))
        cells = [str(side), f"{row['seconds'] / 3600:.3f}", *(f"{size:.2f}" for size in sizes)]
        table.add_row(*cells)
        console.print(", ".join(cells))
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    console.print(table)
    if len(rows) > 1:
        console.print(f"seconds grow with the side to the power of {exponent(rows, 'seconds'):.2f}")


if __name__ == "__main__":
    main()
