"""A simulation's memory does not grow with the number of its nodes."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

FEW, MANY, A_ROUND = 50, 550, 10
MAX_BYTES_PER_NODE = 100_000
SIMULATION = """
import resource, sys
from pathlib import Path
from flwr_distill.simulation.run import simulate

nodes, a_round = int(sys.argv[1]), int(sys.argv[2])
task = {"dataset": "digits", "model": "digits-cnn", "partition.scheme": "iid"}
run = {"strategy": "fedavg", "num-rounds": 2, "fraction-train": a_round / nodes}
node = {"num-partitions": nodes, "device": "cpu"}
simulate(task | run | {"train.holdout": 0.0}, [node] * nodes, Path(sys.argv[3]), workers=2)
for processes in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
    print(resource.getrusage(processes).ru_maxrss * 1024)
"""


def peak_bytes(nodes, folder):
    """Peak memory of the server's process, and of its largest worker."""
    command = [sys.executable, "-c", SIMULATION, str(nodes), str(A_ROUND), str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    return [int(line) for line in run.stdout.splitlines()[-2:]]


def test_a_node_that_waits_costs_no_memory_worth_counting(tmp_path):
    few, many = peak_bytes(FEW, tmp_path / "few"), peak_bytes(MANY, tmp_path / "many")
    for process_of_few, process_of_many in zip(few, many, strict=True):
        assert (process_of_many - process_of_few) / (MANY - FEW) < MAX_BYTES_PER_NODE
