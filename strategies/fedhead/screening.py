"""What FedHEAD's server can judge of models that it does not see: means, students, and norms."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median, median_low
from typing import Any

import numpy as np

from flwr_distill.protocol.arrays import Arrays
from flwr_distill.protocol.outliers import absurdly_large, idle, room, update_norm
from flwr_distill.strategies.common.averages import weighted_mean
from flwr_distill.strategies.common.robust import FEWEST, inner_products, shortening, too_long

LONGER = 1.1
"""A mean of models is no further from the start than the furthest; a trimmed one may be a bit."""
HISTORY = 20
"""Rounds whose median norm the norms of a round are compared with."""


class Norms:
    """Norms of the nodes' updates: those reported in a round, and the medians of earlier ones.

    A score above `threshold` is absurd (`protocol.outliers.absurdly_large`); 0 judges none.

    Attributes
    ----------
    told : dict[int, float]
        Norms of the round by node, without absurd ones.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.of_round: dict[int, float] = {}
        self._medians: list[float] = []

    def begin_round(self, norms: Mapping[int, float]) -> dict[int, str]:
        """Take the norms of a round, without odd ones; return why these are, by node."""
        reasons = dict.fromkeys(self._absurd(norms), "its norm exceeds norm-threshold")
        if self.threshold:
            why = "its update is next to nothing beside the others'"
            reasons |= dict.fromkeys(idle(norms), why)
        self.of_round = {node: norm for node, norm in norms.items() if node not in reasons}
        if self.of_round:
            self._medians = [*self._medians, median(self.of_round.values())][-HISTORY:]
        return reasons

    def exclude(self, nodes: Iterable[int]) -> None:
        """Take no norms of these nodes in this round."""
        for node in nodes:
            self.of_round.pop(node, None)

    def check_mean(
        self, mean: Arrays, start: Arrays, averaged: Iterable[int], rounding: float = 0.0
    ) -> None:
        """Refuse a mean that is further from the start than all models that it is made of.

        `rounding` is how far nodes may have been from the start before they trained.
        Raises ValueError if it is, or is made of none.
        """
        longest = max((self.of_round[node] for node in averaged), default=None)
        if longest is None:
            raise ValueError("all models of the sector were rejected, the leader's own too")
        norm = update_norm(mean, start)
        if self.threshold and norm > LONGER * longest + rounding:
            raise ValueError(f"its norm is {norm:.3g}, above {longest:.3g}, its members' largest")

    def check_student(self, leader: int, student: Arrays, start: Arrays) -> None:
        """Refuse a student that is absurdly far from the start, beside the nodes' updates.

        Raises ValueError if it is.
        """
        if leader in self._absurd({**self.of_round, leader: update_norm(student, start)}):
            raise ValueError("its norm exceeds norm-threshold")

    def _absurd(self, norms: Mapping[int, float]) -> list[int]:
        earlier = {-1 - i: norm for i, norm in enumerate(self._medians)}  # no id is below 0
        return [n for n in absurdly_large({**earlier, **norms}, self.threshold) if n in norms]

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {"median-norms": list(self._medians)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        self._medians = list(state["median-norms"])


def far_longer(norms: Mapping[int, float], num_examples: Mapping[int, int]) -> list[int]:
    """Nodes whose norms are far above those of all sectors, as `robust.too_long` says.

    Two of a sector's five models and one honest one that went astray hide each other from its
    leader; among all nodes they do not.
    """
    if len(norms) < FEWEST:
        return []
    squares = np.diag(np.square(list(norms.values())))
    weights = np.array([num_examples[node] for node in norms], dtype=np.float64)
    return [
        node for node, is_long in zip(norms, too_long(squares, weights), strict=True) if is_long
    ]


def longest(norms: Mapping[int, float], num_examples: Mapping[int, int]) -> float:
    """Norm that no update may have in any sector: `outliers.room` times the median of all nodes."""
    weights = np.array([num_examples[node] for node in norms], dtype=np.float64)
    return room(weights) * median_low(norms.values())


def points_away(weights: Sequence[float], models: Sequence[Arrays], start: Arrays) -> list[bool]:
    """Whether each model's change has a negative product with the weighted sum of the others'."""
    products = inner_products(models, start)
    others = products @ np.asarray(weights) - products.diagonal() * np.asarray(weights)
    return [bool(product < 0) for product in others]


def agreeing(
    students: Mapping[int, Arrays], weights: Mapping[int, float], start: Arrays
) -> dict[int, Arrays]:
    """Students that do not point away from the others, moved back as `robust.shortening` says.

    Of two that point away from each other, neither counts. Given z_m and p_m by leader, and z,
    from which all were distilled.
    """
    if not students:
        return {}
    models = list(students.values())
    of_students = [weights[leader] for leader in students]
    factors = shortening(inner_products(models, start), room(np.array(of_students)))
    away = points_away(of_students, models, start)
    return {
        leader: weighted_mean([(factor, students[leader]), (1 - factor, start)])
        for leader, factor, is_away in zip(students, factors, away, strict=True)
        if not is_away
    }
