"""Expected traffic of FedAvg and FedSeq, with which other formulas are compared."""

BITS_PER_FLOAT = 32


def fedavg_bits(num_clients: int, num_weights: int, num_rounds: int) -> int:
    """Traffic of FedAvg: ``N (2T - 1) |w| B_1`` (HFLDD, eq. 3).

    2T - 1, because the last round's model is not sent down again.
    """
    return num_clients * (2 * num_rounds - 1) * num_weights * BITS_PER_FLOAT


def fedseq_bits(num_superclients: int, num_weights: int, num_rounds: int, clients_each: int) -> int:
    """Traffic of FedSeq: ``O |w| B_1 ((2T - 1) + T J)`` (HFLDD, eq. 19).

    O is `num_superclients`; J, `clients_each`, the clients through which a superclient passes the
    model each round.
    """
    rounds = (2 * num_rounds - 1) + num_rounds * clients_each
    return num_superclients * num_weights * BITS_PER_FLOAT * rounds
