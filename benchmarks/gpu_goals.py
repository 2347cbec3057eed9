"""Goals for steps on a GPU."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.goal import Goal
from benchmarks.gpu_work import QUICK

Row = Mapping[str, Any]


@dataclass(frozen=True)
class StepGoal:
    """What a number of some rows must be.

    Parameters
    ----------
    name : str
        Of the goal.
    rows : tuple[str, ...]
        All of them must meet it.
    number : str
        Key of a row.
    at_least, at_most : float (default: -inf, inf)
        The bounds; give one of them.
    """

    name: str
    rows: tuple[str, ...]
    number: str
    at_least: float = -math.inf
    at_most: float = math.inf

    def judged(self, rows: Mapping[str, Row], on_gpu: bool) -> dict[str, Any]:
        """The goal as JSON, and the rows that missed it; a CPU meets and misses nothing."""
        known = {
            name: float(rows[name][self.number])
            for name in self.rows
            if on_gpu and rows.get(name, {}).get(self.number) is not None
        }
        complete = len(known) == len(self.rows)
        goal = Goal(self.name, known.values(), self.at_least, self.at_most, complete)
        missed = [name for name, value in known.items() if not goal.allows(value)]
        return {**goal.as_json(), "number": self.number, "missed_by": missed}


GOALS = (
    StepGoal(
        "DM, 10 x 10 images: times faster than published",
        ("distil-dm-w128",),
        "published_by_ours",
        at_least=5,
    ),
    StepGoal(
        "KIP, 400 images: times faster than published in float64",
        ("distil-kip-n400",),
        "published_by_ours",
        at_least=3,
    ),
    StepGoal(
        "small networks: a training step by its launch floor",
        ("train-digits-cnn-16-float32", "train-hfldd-mnist-32-float32"),
        "graph_by_launch_floor",
        at_most=3,
    ),
    StepGoal("waits in a step", QUICK, "most_waits", at_most=0),
)
"""On an H100. `published_by_ours`: times that the published step takes longer than ours."""
