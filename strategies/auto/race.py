"""Successive halving: candidates train a few rounds each, and the worst of them leave."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

MOST_CANDIDATES = 3


def rungs(num_candidates: int, budget: int) -> list[int]:
    """Rounds that each candidate has trained for when one leaves, rung by rung.

    After the last rung the best one is left. Those that leave train `budget` rounds at most, all
    together. Of three candidates the two that stay train twice as long again, if that is possible.
    """
    if num_candidates < MOST_CANDIDATES:
        return [budget] if num_candidates > 1 else []
    first = max(1, budget // 4)
    second = budget - 2 * first
    return [first, first + second] if second else [first]


@dataclass
class Race:
    """Who trains next, who is left, and how each did.

    `Race.of` begins one: of `names`, the likeliest first, as many race as `budget` rounds allow.
    """

    left: list[str]
    """Candidates that are left, the best first."""
    ends: list[int]
    """See `rungs`; those to come."""
    rounds: dict[str, int] = field(default_factory=dict)
    """Rounds so far, by candidate."""
    accuracies: dict[str, float] = field(default_factory=dict)
    """On what nodes hold out, after each one's last round that nodes evaluated."""

    @classmethod
    def of(cls, names: Sequence[str], budget: int) -> Self:
        """Begin a race in which those that leave train `budget` rounds at most."""
        left = list(names[: min(1 + budget, MOST_CANDIDATES)])
        return cls(left, rungs(len(left), budget), dict.fromkeys(left, 0))

    @property
    def winner(self) -> str | None:
        """The one that is left; None while several are."""
        return self.left[0] if len(self.left) == 1 else None

    @property
    def next(self) -> str:
        """Who trains the next round."""
        if self.winner:
            return self.winner
        return next(name for name in self.left if self.rounds[name] < self.ends[0])

    def record(self, name: str, accuracy: float | None) -> None:
        """Record a candidate's round, with its model's accuracy if known; the worst may leave."""
        self.rounds[name] += 1
        if accuracy is not None:
            self.accuracies[name] = accuracy
        self._end_rung()

    def retire(self, name: str) -> None:
        """Take out a candidate that cannot train here."""
        self.left.remove(name)
        self._end_rung()

    def _end_rung(self) -> None:
        if len(self.left) < 2 or any(self.rounds[name] < self.ends[0] for name in self.left):
            return
        self.ends.pop(0)
        self.left.sort(key=lambda name: -self.accuracies.get(name, 0.0))
        del self.left[-1 if self.ends else 1 :]

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: the arguments of the constructor."""
        return dict(vars(self))
