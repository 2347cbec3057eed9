"""What FedAvg should cost, in bits: the formula that others are compared with (HFLDD, eq. 3)."""

BITS_PER_FLOAT = 32
BITS_PER_PIXEL = 8


def fedavg_bits(num_clients: int, num_weights: int, num_rounds: int) -> int:
    """Traffic of FedAvg: ``N (2T - 1) |w| B_1`` (HFLDD, eq. 3).

    Parameters
    ----------
    num_clients : int
        N, the clients that take part each round.
    num_weights : int
        |w|, the values of the model.
    num_rounds : int
        T. The last round's model is not sent down again, hence 2T - 1.
    """
    return num_clients * (2 * num_rounds - 1) * num_weights * BITS_PER_FLOAT
