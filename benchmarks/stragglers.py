"""Rounds that end with some replies (`buffer`), beside rounds that wait for all.

``python -m benchmarks.stragglers [--data digits] [--data-root DIR] [--seeds 0 1 2] [--rounds 20]
[--buffers 3 5] [--json FILE]``

Ten nodes whose speeds spread 1 to 10: node i takes as long for a message to train as 10^(i/9). The
real apps train in this process, and replies arrive by a clock of their own: its unit is a message
of the fastest node. A run that waits for all has ``--rounds`` rounds; others have so many that the
clock runs as long. "Time to 90 %" is until the accuracy first reached nine tenths of the final one
(mean of the last three rounds) of the run that waits for all.
"""

import argparse
import heapq
import json
import math
import statistics
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, MessageType, RecordDict
from rich.console import Console
from rich.table import Table

from benchmarks.arena import DATA
from benchmarks.figures import read_lines
from benchmarks.in_process import FIRST_NODE, Settings, only_errors
from flwr_distill.client.app import app as client_app
from flwr_distill.flower.task_identity import identify
from flwr_distill.server.app import main as server_app
from flwr_distill.simulation.grid import Functions, Node, SimulationGrid
from flwr_distill.storage.store import DURABLE

NODES = 10
SPREAD = 10.0


class Clock:
    """A pool whose replies arrive one by one, each when its node would be through."""

    def __init__(self, nodes: Mapping[int, Node], seconds: Mapping[int, float]) -> None:
        self._functions = Functions(nodes)
        self._seconds = seconds
        self._coming: list[tuple[float, int, str, RecordDict | Error]] = []
        self._number = 0
        self.now = 0.0
        self.starts: list[float] = []
        """When each round of training began."""
        self.count: Counter[int] = Counter()
        """Messages to train, by node."""

    def submit(self, messages: Sequence[Message]) -> None:
        """Have nodes answer, and their replies come later."""
        if messages and messages[0].metadata.message_type == MessageType.TRAIN:
            self.starts.append(self.now)
        for message in messages:
            self._functions.submit([message])
            about = message.metadata
            trains = about.message_type == MessageType.TRAIN
            self.count[about.dst_node_id] += trains
            at = self.now + (self._seconds[about.dst_node_id] if trains else 0.0)
            for name, answer in self._functions.wait(0):
                self._number += 1
                heapq.heappush(self._coming, (at, self._number, name, answer))

    def wait(self, seconds: float) -> list[tuple[str, RecordDict | Error]]:
        """The next reply."""
        if not self._coming:
            return []
        at, _, name, answer = heapq.heappop(self._coming)
        self.now = max(self.now, at)
        return [(name, answer)]


def play(config: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Time and accuracy after each round."""
    identify(0, 1, 1)
    with only_errors(), tempfile.TemporaryDirectory() as temporary:
        config = {**config, "runs-dir": temporary, "min-nodes": NODES}

        def node(place: int) -> Node:
            settings: Settings = {
                "partition-id": place,
                "num-partitions": NODES,
                "device": "cpu",
                "state-dir": f"{temporary}/nodes",
                DURABLE: False,
            }
            context = Context(1, FIRST_NODE + place, dict(settings), RecordDict(), config)
            return lambda message: client_app(message, context).content

        seconds = {FIRST_NODE + i: SPREAD ** (i / (NODES - 1)) for i in range(NODES)}
        clock = Clock({FIRST_NODE + i: node(i) for i in range(NODES)}, seconds)
        grid = SimulationGrid(list(seconds), clock)
        server_app(grid, Context(1, 1, {}, RecordDict(), config))
        rows = read_lines(Path(temporary) / "1" / "metrics.jsonl")
    accuracies = [float(row["accuracy"]) for row in rows]
    return list(zip([*clock.starts, clock.now], accuracies, strict=True))


def final(curve: Sequence[tuple[float, float]]) -> float:
    """Mean accuracy of the last three rounds."""
    return statistics.mean(accuracy for _, accuracy in curve[-3:])


def reached(curve: Sequence[tuple[float, float]], accuracy: float) -> float:
    """When a run first had an accuracy."""
    return next((time for time, own in curve if own >= accuracy), math.nan)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", choices=DATA, default="digits")
    parser.add_argument("--data-root", default="")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--buffers", type=int, nargs="+", default=[3, 5])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for seed in arguments.seeds:
        config = {
            **DATA[arguments.data],
            "strategy": "fedavg",
            "partition.scheme": "dirichlet",
            "partition.alpha": 1.0,
            "seed": seed,
            "fraction-evaluate": 0.0,
            "data-root": arguments.data_root,
        }
        waits = play({**config, "num-rounds": arguments.rounds})
        goal, end = 0.9 * final(waits), waits[-1][0]
        rows.append(
            {"seed": seed, "buffer": 0, "final": final(waits), "time": reached(waits, goal)}
        )
        for size in arguments.buffers:
            # A fast node sends ten replies in the time of the slowest, and all together this many.
            per_unit = sum(SPREAD ** (-i / (NODES - 1)) for i in range(NODES))
            rounds = math.floor(end * per_unit / size)
            curve = play({**config, "num-rounds": rounds, "buffer": size})
            rows.append(
                {"seed": seed, "buffer": size, "final": final(curve), "time": reached(curve, goal)}
            )
    table = Table(title=f"{arguments.data}, speeds 1 to {SPREAD:g}")
    for column in ("seed", "buffer", "final accuracy", "time to 90 %"):
        table.add_column(column, justify="right")
    for row in rows:
        time = f"{row['time']:.1f}"
        table.add_row(str(row["seed"]), str(row["buffer"]), f"{row['final']:.1%}", time)
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
