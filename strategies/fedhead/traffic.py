"""Expected traffic of FedHEAD by the paper's formula."""

from typing import Any

from flwr_distill.strategies.common.traffic import BITS_PER_FLOAT


def formulas(strategy: Any, num_nodes: int, num_weights: int, num_rounds: int) -> dict[str, int]:
    """Bits of a run by formula, for the report; empty before there are sectors."""
    if not strategy.topology:
        return {}
    sectors = len(strategy.topology.clusters)
    return {"fedhead (FedHEAD, table 1)": fedhead_bits(sectors, num_weights, num_rounds)}


def fedhead_bits(num_sectors: int, num_weights: int, num_rounds: int) -> int:
    """Traffic of FedHEAD through the server: ``2 M T`` round trips (FedHEAD, table 1).

    Only leaders exchange models with the server, however many nodes there are: w and w_m, z and
    z_m in each round.
    """
    return 4 * num_sectors * num_rounds * num_weights * BITS_PER_FLOAT
