"""Sectors of nodes and their leaders (FedHEAD)."""

from collections import Counter
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray


def assign_sectors(
    declared: Mapping[int, int | None],
    num_sectors: int,
    generator: np.random.Generator,
    known: Mapping[int, int] | None = None,
) -> dict[int, int]:
    """Put each node into a sector.

    A node stays in its known sector, or goes to the one it declares. The others, in random order,
    join the smallest sector, or the smallest of ``num_sectors`` new ones if there are none.

    Parameters
    ----------
    declared : Mapping[int, int or None]
        For each node, the sector declared by its owner, or None.
    num_sectors : int
        M, if sectors are drawn; never more than nodes.
    generator : np.random.Generator
        Draws the order.
    known : Mapping[int, int], optional (default: None)
        Earlier sectors, which do not change.

    Returns
    -------
    dict[int, int]
        Sector of each node in ``declared`` or ``known``.
    """
    sector_of = dict(known or {})
    sector_of.update({n: s for n, s in declared.items() if s is not None and n not in sector_of})
    rest = [node for node in declared if node not in sector_of]
    sectors = sorted(set(sector_of.values())) or list(range(min(num_sectors, len(rest))))
    sizes = Counter(sector_of.values())
    for i in generator.permutation(len(rest)):
        smallest = min(sectors, key=lambda sector: (sizes[sector], sector))
        sector_of[rest[i]] = smallest
        sizes[smallest] += 1
    return sector_of


def draw_leader(num_examples: NDArray[np.int64], generator: np.random.Generator) -> int:
    """Position of a sector's leader: node k with probability ``p_km / p_m``."""
    return int(generator.choice(len(num_examples), p=num_examples / num_examples.sum()))
