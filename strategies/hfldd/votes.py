"""Votes on virtual data: what is left out because models that never saw it know better."""

from collections.abc import Collection, Mapping, Sequence
from statistics import median, median_high

import numpy as np

MOST_VOTERS = 3
"""Models that vote on a head's virtual data; of three, one may be spoiled itself."""
CHANCE = 0.5
"""Vote of a model that knows nothing of a parcel, or on a parcel whose labels mean nothing."""
CLEAR = 0.6
"""Usual vote from which on models know enough to vote; digits have .69 after the first round."""

CONTRADICTED = 0.4
"""Vote of one that knows better: flipped labels of digits have 0.22 to 0.39."""


def contradicted(votes: Mapping[int, Mapping[int, Sequence[float]]]) -> list[int]:
    """Members whose labels all voters find clearly less likely than chance; see `verdicts`.

    Of two clusters either may be spoiled: a spoiled model contradicts honest data as well.
    """
    return [
        node
        for of_head in votes.values()
        for node, given in of_head.items()
        if max(given) < CONTRADICTED
    ]


def verdicts(votes: Mapping[int, Mapping[int, Sequence[float]]]) -> dict[int, dict[int, bool]]:
    """Whose virtual data are voted out.

    A parcel's score is the median of its votes, the higher one of two. It is out if its score lies
    within the first quarter of the way from chance to the usual one. Usual is the median over heads
    of the median over the head's parcels, so that a head that lies about its members counts once.

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
    least = CHANCE + (usual - CHANCE) / 4
    return {
        head: {node: score < least for node, score in of_head.items()}
        for head, of_head in scores.items()
    }


def voters(
    head: int, classes: Mapping[int, Collection[int]], generator: np.random.Generator
) -> list[int]:
    """Heads whose models vote on the virtual data of another head's members.

    Those of other clusters with most of its classes; equals are drawn.

    Parameters
    ----------
    head : int
        The head that holds the data, which does not vote.
    classes : Mapping[int, Collection[int]]
        Classes that the cluster of each head with a usable model holds.
    generator : np.random.Generator
        Source of the draws.
    """
    others = [other for other in classes if other != head]
    drawn = [others[int(place)] for place in generator.permutation(len(others))]
    drawn.sort(key=lambda other: -len({*classes[other]} & {*classes[head]}))
    return drawn[:MOST_VOTERS]
