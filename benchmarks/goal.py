"""A bound that a measurement has to meet."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Goal:
    """Measured values and their bounds.

    Parameters
    ----------
    name : str
        What was measured, with its unit.
    values : Collection[float]
        All must lie within the bounds; the worst of them is shown.
    at_least, at_most : float (default: -inf, inf)
        The bounds; give one of them.
    complete : bool (default: True)
        False if values are missing: the goal can then be missed, but not met.
    """

    name: str
    values: Collection[float]
    at_least: float = -math.inf
    at_most: float = math.inf
    complete: bool = True

    def allows(self, value: float) -> bool:
        """Whether a value lies within the bounds."""
        return self.at_least <= value <= self.at_most

    @property
    def met(self) -> bool | None:
        """Whether all values lie within the bounds; None if not enough was measured."""
        if not all(self.allows(value) for value in self.values):
            return False
        return True if self.values and self.complete else None

    @property
    def verdict(self) -> str:
        """The same in words."""
        return {True: "met", False: "missed", None: "not measured"}[self.met]

    @property
    def measured(self) -> float | None:
        """The worst value."""
        worst = min if math.isfinite(self.at_least) else max
        return worst(self.values, default=None)

    @property
    def bound(self) -> str:
        """The bounds in words."""
        word, value = ("at least", self.at_least)
        if not math.isfinite(value):
            word, value = ("at most", self.at_most)
        return f"{word} {value:g}"

    def as_json(self) -> dict[str, Any]:
        """Name, worst value, bound and verdict."""
        return {key: getattr(self, key) for key in ("name", "measured", "bound", "met", "verdict")}
