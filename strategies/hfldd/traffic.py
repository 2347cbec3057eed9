"""Expected traffic of HFLDD, and of FedSeq with as many clusters, by the paper's formulas."""

from typing import Any

from flwr_distill.strategies.common.traffic import BITS_PER_FLOAT, fedavg_bits, fedseq_bits


def formulas(strategy: Any, num_nodes: int, num_weights: int, num_rounds: int) -> dict[str, int]:
    """Bits of a run by formula, for the report; empty before the clusters are formed."""
    if not strategy.topology:
        return {}
    clusters = len(strategy.topology.clusters)
    return {
        "hfldd (HFLDD, eq. 18)": strategy.expected_bits(num_weights, num_rounds),
        "fedseq (HFLDD, eq. 19)": fedseq_bits(
            clusters, num_weights, num_rounds, clients_each=num_nodes // clusters
        ),
    }


def hfldd_bits(
    *,
    num_clients: int,
    num_auxiliary: int,
    num_classes: int,
    distilled_values: int,
    bits_per_value: int,
    models_to_members: int = 0,
    num_heads: int,
    num_weights: int,
    num_rounds: int,
) -> int:
    """Traffic of HFLDD: soft labels, distilled data and the heads' training (HFLDD, eq. 18).

    ``N |D_g| N_c B_1 + sum over members of |D~_i| B_2 + H |w| (2T - 1) B_1``, with N clients, D_g
    the auxiliary set and N_c classes, the values (pixels) of all distilled samples, H heads, |w|
    weights and T rounds. `models_to_members`, with which members refined their virtual data, are
    not in the paper.
    """
    return (
        num_clients * num_auxiliary * num_classes * BITS_PER_FLOAT
        + distilled_values * bits_per_value
        + models_to_members * num_weights * BITS_PER_FLOAT
        + fedavg_bits(num_heads, num_weights, num_rounds)
    )
