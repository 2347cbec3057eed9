"""Goals for steps on a GPU, and whether a measurement meets them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.gpu_work import QUICK

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Goal:
    """What a number of some rows must be.

    Parameters
    ----------
    name : str
        Of the goal.
    rows : tuple[str, ...]
        Whose worst number counts.
    number : str
        Key of a row.
    bound : float
        Largest or smallest value that meets the goal.
    bound_is : "least" or "most"
        Which of the two.
    """

    name: str
    rows: tuple[str, ...]
    number: str
    bound: float
    bound_is: Literal["least", "most"]

    def judged(self, rows: Mapping[str, Row], on_gpu: bool) -> dict[str, Any]:
        """Name, measurement, bound and verdict; a CPU meets and misses nothing.

        Without all of its rows a goal can be missed, but not met.
        """
        known = {
            name: float(rows[name][self.number])
            for name in self.rows
            if on_gpu and rows.get(name, {}).get(self.number) is not None
        }
        missed = [name for name, value in known.items() if not self._allows(value)]
        worst = min if self.bound_is == "least" else max
        met = False if missed else True if len(known) == len(self.rows) else None
        return {
            "name": self.name,
            "number": self.number,
            "measured": worst(known.values()) if known else None,
            "bound": self.bound,
            "bound_is": self.bound_is,
            "met": met,
            "verdict": {True: "met", False: "missed", None: "not measured"}[met],
            "missed_by": missed,
        }

    def _allows(self, value: float) -> bool:
        return value >= self.bound if self.bound_is == "least" else value <= self.bound


GOALS = (
    Goal("dm", ("distil-dm-w128",), "published_by_ours", 5, "least"),
    Goal("kip-n400", ("distil-kip-n400",), "published_by_ours", 3, "least"),
    Goal(
        "small-networks",
        ("train-digits-cnn-16-float32", "train-hfldd-mnist-32-float32"),
        "graph_by_launch_floor",
        3,
        "most",
    ),
    Goal("no-waits", QUICK, "most_waits", 0, "most"),
)
"""On an H100. `published_by_ours`: times that the published step takes longer than ours."""
