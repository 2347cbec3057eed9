"""What FedHEAD should cost by the paper's formula, in bits."""

from typing import Any

from strategies.common.traffic import BITS_PER_FLOAT


def formulas(strategy: Any, num_nodes: int, num_weights: int, num_rounds: int) -> dict[str, int]:
    """Bits of a run by formula; none before there are sectors.

    Parameters
    ----------
    strategy : FedHEAD
        At the end of the run.
    num_nodes : int
        N, the nodes that the run met; it does not enter.
    num_weights : int
        |w|, the values of the model.
    num_rounds : int
        T.
    """
    if not strategy.topology:
        return {}
    sectors = len(strategy.topology.clusters)
    return {"fedhead (table 1)": fedhead_bits(sectors, num_weights, num_rounds)}


def fedhead_bits(num_sectors: int, num_weights: int, num_rounds: int) -> int:
    """Traffic of FedHEAD through the server: ``2 M T`` round trips (FedHEAD, table 1).

    Leaders alone exchange models with the server, however many nodes there are: w and w_m, z and
    z_m in each round.

    Parameters
    ----------
    num_sectors : int
        M, the sectors.
    num_weights : int
        |w|, the values of the model.
    num_rounds : int
        T.
    """
    return 4 * num_sectors * num_rounds * num_weights * BITS_PER_FLOAT
