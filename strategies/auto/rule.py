"""Which strategy suits how much the nodes' labels differ."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from flwr_distill.protocol.method import CHOICE
from flwr_distill.strategies.common.sections import RunFiles, Section

ALIKE = 0.2
"""Skew up to which the nodes' labels are as good as alike."""
MOST = 0.5
"""Share of the classes: nodes with more may take long steps, with momentum."""


@dataclass(frozen=True)
class Choice:
    """A strategy, and what it was chosen by (see `choose`); None if nodes were not asked."""

    strategy: str
    skew: float | None
    held: float | None

    @property
    def reason(self) -> str:
        """What was seen and what follows, for log and report."""
        if self.skew is None and self.held is None:
            return (
                "the model is a frozen network, the best head of which is in the nodes' sums, "
                f"whatever their labels: {self.strategy}"
            )
        seen = []
        if self.skew is not None:
            seen.append(f"the nodes' labels differ by {self.skew:.0%} of one class a node")
        if self.held is not None:
            seen.append(f"a node holds {self.held:.0%} of the classes")
        return f"{', and '.join(seen)}: {self.strategy}"

    def as_json(self) -> dict[str, Any]:
        """Content of ``choice.json``."""
        return {**asdict(self), "reason": self.reason}


ON_FROZEN = Choice("analytic", None, None)
"""Where nothing but the head of a frozen network trains."""


def held_suffices(held: float | None) -> bool:
    """Whether the classes that nodes have decide, however much labels differ; see `choose`."""
    return held is not None and held > MOST


def choose(skew: float | None, held: float | None) -> Choice:
    """Choose by how much labels differ; docs/archive/benchmarks.md has the measurements.

    Nodes whose labels are alike, or that have most classes, learn fastest with momentum. Else heads
    that see all classes in virtual data learn more than any average of what nodes learned alone.

    Parameters
    ----------
    skew : float, optional
        See :func:`strategies.auto.skew.label_skew`; None does where `held_suffices`.
    held : float, optional
        Share of the classes that the median node has; None if a node does not say.
    """
    if skew is None or skew <= ALIKE or held_suffices(held):
        return Choice("fedfa", skew, held)
    return Choice("hfldd", skew, held)


def choice(run: RunFiles) -> Section | None:
    """Return the choice and its reason; None before the run's end."""
    content = run.artifact(CHOICE)
    if not content:
        return None
    reason = json.loads(content)["reason"]
    return Section("Strategy", [f"{reason[0].upper()}{reason[1:]}."])
