"""Which strategy suits how much the nodes' labels differ."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Choice:
    """A strategy, and why.

    Parameters
    ----------
    strategy : str
        Its name.
    skew : float
        How much the nodes' labels differ, from 0 (alike) to about 1 (one class a node).
    """

    strategy: str
    skew: float

    @property
    def reason(self) -> str:
        """What was seen and what follows, for log and report."""
        return f"the nodes' labels differ by {self.skew:.0%} of one class a node: {self.strategy}"

    def as_json(self) -> dict[str, Any]:
        """Content of ``choice.json``."""
        return {**asdict(self), "reason": self.reason}


def choose(skew: float) -> Choice:
    """Choose by how much labels differ; docs/benchmarks.md has the measurements.

    Parameters
    ----------
    skew : float
        See :func:`strategies.auto.skew.label_skew`.
    """
    return Choice("hfldd" if skew > MOST_FOR_AVERAGES else "feddyn", skew)


MOST_FOR_AVERAGES = 0.68
