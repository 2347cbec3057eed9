"""Expected traffic of FedAvg, with which other formulas are compared."""

BITS_PER_FLOAT = 32


def fedavg_bits(num_clients: int, num_weights: int, num_rounds: int) -> int:
    """Traffic of FedAvg: ``N (2T - 1) |w| B_1`` (HFLDD, eq. 3).

    2T - 1, because the last round's model is not sent down again.
    """
    return num_clients * (2 * num_rounds - 1) * num_weights * BITS_PER_FLOAT
