"""Expected traffic of FedSeq by the formula of HFLDD's paper."""

from typing import Any

from flwr_distill.strategies.common.traffic import fedseq_bits


def formulas(strategy: Any, num_nodes: int, num_weights: int, num_rounds: int) -> dict[str, int]:
    """Bits of a run by formula, for the report; empty before superclients are formed."""
    if not strategy.topology:
        return {}
    superclients = len(strategy.topology.clusters)
    each = num_nodes // superclients
    return {"fedseq (HFLDD, eq. 19)": fedseq_bits(superclients, num_weights, num_rounds, each)}
