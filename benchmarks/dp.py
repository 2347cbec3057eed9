"""Accuracy under differential privacy: digits, 10 nodes, in this process.

``python -m benchmarks.dp [--only fedavg|hfldd] [--seeds N]``

FedAvg with DP-SGD at several noise multipliers, on nodes with all classes; HFLDD with
differentially private virtual data, on nodes with two classes each, whose heads train without.
Noise comes from the operating system, so no two runs are equal.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import fmean

from benchmarks.in_process import Settings, run_in_process

NODES = 10
FEDAVG: Settings = {
    "strategy": "fedavg",
    "partition.scheme": "iid",
    "num-rounds": 10,
}
HFLDD: Settings = {
    "strategy": "hfldd",
    "num-rounds": 10,
    "hfldd.distiller": "dm",
    "hfldd.start": "noise",
    "hfldd.distill-steps": 200,
}
CASES: dict[str, list[tuple[str, Settings]]] = {
    "fedavg": [
        ("without", {**FEDAVG, "train.lr": 0.2}),
        *((f"noise {z:g}", {**FEDAVG, "train.lr": 0.2, "train.dp-noise": z}) for z in (0.6, 1, 2)),
    ],
    "hfldd": [
        ("without", HFLDD),
        *((f"epsilon {e:g}", {**HFLDD, "hfldd.dp-epsilon": e}) for e in (10, 3, 1)),
    ],
}


def run(settings: Settings) -> tuple[float, float]:
    """Accuracy after the last round, and the largest epsilon (0 if none)."""
    with tempfile.TemporaryDirectory() as folder:
        nodes = [{"num-partitions": NODES}] * NODES
        rows = run_in_process(settings, nodes, Path(folder))
        journal = (Path(folder) / "1" / "journal.jsonl").read_text().splitlines()
    numbers = [n for line in journal for n in json.loads(line).get("nodes", {}).values()]
    return rows[-1]["accuracy"], max((n.get("dp-epsilon", 0.0) for n in numbers), default=0.0)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    for strategy in [arguments.only] if arguments.only else CASES:
        for name, settings in CASES[strategy]:
            runs = [run({**settings, "seed": seed}) for seed in range(arguments.seeds)]
            accuracy, epsilon = fmean(a for a, _ in runs), max(e for _, e in runs)
            print(
                f"{strategy:8}{name:12} accuracy {accuracy:.3f}  epsilon {epsilon:.2f}", flush=True
            )


if __name__ == "__main__":
    main()
