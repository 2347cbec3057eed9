"""Votes on virtual data, and on heads: what is left out because other models know better."""

from collections.abc import Collection, Mapping, Sequence
from statistics import median, median_high
from typing import NamedTuple

import numpy as np

MOST_VOTERS = 3
"""Models that vote on a head's virtual data; of three, one may be spoiled itself."""
CHANCE = 0.5
"""Vote of a model that knows nothing of a parcel, or on a parcel whose labels mean nothing."""
CLEAR = 0.6
"""Usual vote from which on models know enough to vote; digits have .69 after the first round."""
MUCH_WORSE = 0.1
"""Test accuracy that an honest head does not lose beside both its start and the other heads."""


class Tested(NamedTuple):
    """A model on the server's test samples: accuracy in [0, 1], mean cross-entropy in nats."""

    accuracy: float
    loss: float


def verdicts(votes: Mapping[int, Mapping[int, Sequence[float]]]) -> dict[int, dict[int, bool]]:
    """Whose virtual data are voted out.

    A parcel's score is the median of its votes, the higher one of two. It is out if its score is
    nearer to chance than to the usual one. Usual is the median over heads of the median over the
    head's parcels, so that a head that lies about its members counts once.

    Parameters
    ----------
    votes : Mapping[int, Mapping[int, Sequence[float]]]
        Votes in [0, 1] on each member's parcel, by head and member; none empty.

    Returns
    -------
    dict[int, dict[int, bool]]
        Whether it is out, by head and member; empty as long as models know too little.
    """
    scores = {
        head: {node: median_high(given) for node, given in of_head.items()}
        for head, of_head in votes.items()
        if of_head
    }
    usual = median(median(of_head.values()) for of_head in scores.values()) if scores else CHANCE
    if usual < CLEAR:
        return {}
    least = (CHANCE + usual) / 2
    return {
        head: {node: score < least for node, score in of_head.items()}
        for head, of_head in scores.items()
    }


def voters(
    head: int,
    others: Collection[int],
    start: Tested | None,
    tested: Mapping[int, Tested],
    generator: np.random.Generator,
) -> list[int]:
    """Heads whose models vote on the virtual data of another head's members.

    Parameters
    ----------
    head : int
        The head that holds the data, which does not vote.
    others : Collection[int]
        All heads with a usable model.
    start : Tested, optional
        The global model before the round, if the server has test samples. Then the models that test
        best vote, if they are better than that; else random ones.
    tested : Mapping[int, Tested]
        The heads' models on the server's test samples; empty without.
    generator : np.random.Generator
        Source of the draws.
    """
    able = [other for other in others if other != head]
    if start is None:
        drawn = generator.permutation(len(able))[:MOST_VOTERS]
        return [able[int(place)] for place in drawn]
    learnt = [other for other in able if tested[other].loss < start.loss]
    return sorted(learnt, key=lambda other: tested[other].loss)[:MOST_VOTERS]


def spoiled(start: Tested, tested: Mapping[int, Tested]) -> list[int]:
    """Heads whose models are much worse than both their start and the other heads' models.

    Honest heads may be bad in the first rounds, but then so is the model that they started from.

    Parameters
    ----------
    start : Tested
        The global model before the round.
    tested : Mapping[int, Tested]
        The heads' models.
    """
    bad = []
    for head, test in tested.items():
        others = [other.accuracy for node, other in tested.items() if node != head]
        if others and test.loss > start.loss:
            least = min(start.accuracy, median(others)) - MUCH_WORSE
            if test.accuracy < least:
                bad.append(head)
    return bad
