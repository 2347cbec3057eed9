"""Start and first training step of a worker, with and without `node.compiler`'s stand-in.

``python -m benchmarks.first_step [--repeats 5] [--json FILE]``

Each start is a process of its own, and both ways take turns. Seconds count from the process's
start: until it has imported PyTorch and has its device, and until its first step has been taken.
Memory is read after that step: PSS, and what is the process's own (USS).
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.figures import write_json

WAYS = ("stand-in", "imported")


def measure(way: str, started: float) -> dict[str, float]:
    """Start as a worker does, and take a step."""
    from flwr_distill.flower import worker  # it counts, as the rest of the start does
    from flwr_distill.node.compiler import put_off_compiler
    from flwr_distill.node.device import take_device
    from flwr_distill.node.kernel import keep_freed

    worker._preload(["torch"])
    if way == "stand-in":
        put_off_compiler()
    keep_freed()
    take_device("cpu", place=0)
    ready = time.monotonic() - started
    import torch
    from torch.nn import functional

    import flwr_distill.client.app  # noqa: F401  (the app comes with the first message)

    before = time.monotonic()
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    logits = model(torch.randn(64, 1, 28, 28))
    functional.cross_entropy(logits, torch.zeros(64, dtype=torch.long)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    now = time.monotonic()
    memory = psutil.Process().memory_full_info()
    return {
        "ready [s]": ready,
        "first step [s]": now - before,
        "both [s]": ready + now - before,
        "CPU [s]": time.process_time(),
        "PSS [MB]": memory.pss / 1e6,
        "USS [MB]": memory.uss / 1e6,
    }


def main() -> None:
    """Measure, print the table and write JSON."""
    parser = argparse.ArgumentParser(prog="benchmarks.first_step", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child[0], float(args.child[1]))))
        return
    rows: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for turn in range(args.repeats + 1):
        for way in WAYS if turn % 2 else WAYS[::-1]:
            command = [sys.executable, "-P", "-m", "benchmarks.first_step", "--child", way]
            command.append(str(time.monotonic()))
            environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
            output = subprocess.check_output(command, text=True, env=environment)
            if turn:  # the first start reads files from the disk
                rows[way].append(json.loads(output.splitlines()[-1]))
    table = Table("", *rows[WAYS[0]][0], title=f"load {os.getloadavg()[0]:.1f}")
    for way, found in rows.items():
        values = [[row[name] for row in found] for name in found[0]]
        table.add_row(way, *(f"{median(v):.2f} ({min(v):.2f}-{max(v):.2f})" for v in values))
    Console(width=160).print(table)
    write_json(args.json, rows)


if __name__ == "__main__":
    main()
