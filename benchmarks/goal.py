"""A bound that a measurement has to meet."""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Goal:
    """A measured value and its bounds.

    Parameters
    ----------
    name : str
        What was measured, with its unit.
    measured : float
        NaN meets no bound.
    at_least, at_most : float (default: -inf, inf)
        The bounds.
    """

    name: str
    measured: float
    at_least: float = -math.inf
    at_most: float = math.inf

    @property
    def met(self) -> bool:
        """Whether the value lies within the bounds."""
        return self.at_least <= self.measured <= self.at_most

    @property
    def bound(self) -> str:
        """The bounds in words."""
        bounds = [("at least", self.at_least), ("at most", self.at_most)]
        return " and ".join(f"{word} {bound:g}" for word, bound in bounds if math.isfinite(bound))

    def as_json(self) -> dict[str, Any]:
        """Value, bounds in words, and whether they are met."""
        measured = self.measured if math.isfinite(self.measured) else None
        return {"name": self.name, "measured": measured, "bound": self.bound, "met": self.met}
