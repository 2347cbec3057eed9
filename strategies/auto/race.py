"""Contests: a few times in a run each candidate trains a round, from the best model so far."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

LEAD, FAR = 2, 3
"""Standard errors of a difference: by so many two accuracies rarely, and hardly ever, differ by
chance."""
MOST_CONTESTS = 10
"""More would hardly find anything new, and a report has a row for each."""


@dataclass
class Race:
    """Who trains next, who is left, and how each did.

    In a contest all that are left train one round from the same model. The best of them leads, and
    trains alone until the next contest. The others' rounds are lost, but a method that is good late
    gets the model of one that was good early. The likeliest is best unless another is ahead by more
    than chance. Who is far behind in a contest but the first leaves.
    """

    left: list[str]
    """Candidates that are left, the leader first."""
    starts: list[int]
    """Rounds that the leading model has trained for when contests begin; those to come."""
    kept: int = 0
    """Rounds that the leading model has trained for."""
    rounds: dict[str, int] = field(default_factory=dict)
    """Rounds that each candidate has trained, in all, the likeliest first."""
    results: dict[str, float | None] = field(default_factory=dict)
    """Accuracies on what nodes hold out, of those that have trained in the contest under way."""
    samples: float = 0
    """Held-out samples on which a plain mean would be as certain as the latest evaluation."""
    contests: list[Mapping[str, float | None]] = field(default_factory=list)
    """The results of those that are over, the leader's first."""

    @classmethod
    def of(cls, names: Sequence[str], budget: int, num_rounds: int) -> Self:
        """Begin a race of `num_rounds` rounds, of which `budget` are lost at most.

        The likeliest of `names` is first; without a budget it trains alone. Contests are spread
        evenly over the run, the first at its start. With a budget below half of the rounds the
        leader trains the last one.
        """
        number = min(budget // max(1, len(names) - 1), MOST_CONTESTS)
        left = list(names if number else names[:1])
        useful = num_rounds - number * (len(left) - 1)
        starts = [place * useful // number for place in range(number)]
        return cls(left, starts, rounds=dict.fromkeys(left, 0))

    @property
    def contest(self) -> bool:
        """Whether a contest is under way or about to begin."""
        return len(self.left) > 1 and bool(self.starts) and self.kept >= self.starts[0]

    @property
    def leader(self) -> str:
        """Whose model is the best."""
        return self.left[0]

    @property
    def next(self) -> str:
        """Who trains the next round."""
        if not self.contest:
            return self.leader
        return next(name for name in self.left if name not in self.results)

    def record(self, name: str, accuracy: float | None, samples: float = 0) -> None:
        """Record a candidate's round, and its model's accuracy on so many samples if it is known.

        May end a contest.
        """
        self.rounds[name] += 1
        if self.contest:
            self.results[name], self.samples = accuracy, samples
            self._end_contest()
        else:
            self.kept += 1

    def retire(self, name: str) -> None:
        """Take out a candidate that cannot train here."""
        self.left.remove(name)
        self.results.pop(name, None)
        self._end_contest()

    def _end_contest(self) -> None:
        """Rank those that are left once all have trained.

        Where one was not evaluated nobody knows who is better, and none takes the lead or leaves.
        """
        if not self.results or self.results.keys() != set(self.left):
            return
        accuracies = {name: value for name, value in self.results.items() if value is not None}
        is_known, before = len(accuracies) == len(self.left), len(self.contests)
        if is_known:
            error = _standard_error(max(accuracies.values()), self.samples)
            lead = {next(iter(self.rounds)): LEAD * error}
            self.left.sort(key=lambda name: -accuracies[name] - lead.get(name, 0.0))
        self.contests.append({name: self.results[name] for name in self.left})
        if is_known and before:
            least = accuracies[self.leader] - FAR * error
            self.left = [name for name in self.left if accuracies[name] >= least]
        self.kept += 1
        self.results = {}
        del self.starts[0]

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: the arguments of the constructor."""
        return dict(vars(self))


def _standard_error(accuracy: float, samples: float) -> float:
    """Of the difference of two accuracies on so many samples; above 0 for one of 1, too."""
    likely = (accuracy * samples + 1) / (samples + 2)  # Laplace's rule of succession
    return math.sqrt(2 * likely * (1 - likely) / max(samples, 1))
