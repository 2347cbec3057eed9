"""Run the parts of the GPU kit, and write what they found.

``python -m benchmarks.gpu_kit [--parts NAME ...] [--data-root DIR] [--out DIR] [--commit NAME]``
(``make gpu PARTS="doctor tests"``)

Each part is a process with a time limit; one that fails does not stop the others. Without a GPU,
small versions run on the CPU, and each line says so. Writes ``results.json`` and ``results.md``
after each part, and the parts' output as ``<part>.log``. Exits with 1 if a part failed or, on a
GPU, a goal was missed.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.gpu_kit.build import KIT
from benchmarks.gpu_kit.machine import read_machine
from benchmarks.gpu_kit.parts import PARTS, Place
from benchmarks.gpu_kit.results import Results
from benchmarks.gpu_kit.runner import run_part


def main() -> None:
    """Run the parts and print their results."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_kit", description=__doc__)
    names = [part.name for part in PARTS]
    parser.add_argument("--parts", nargs="+", choices=names, default=names, help="these alone")
    parser.add_argument("--data-root", type=Path, default=KIT / "data", help="folder with MNIST")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="for the results")
    parser.add_argument("--commit", default="unknown", help="what the results are of")
    arguments = parser.parse_args()

    machine = read_machine()
    place = Place(bool(machine["gpu"]), arguments.data_root.resolve(), KIT / "runs")
    results = Results(arguments.out, machine, arguments.commit)
    for part in PARTS:
        if part.name in arguments.parts:
            results.add(part, run_part(part, place, arguments.out))
    print("\n".join(results.markdown()))
    sys.exit(results.failed)


if __name__ == "__main__":
    main()
