"""What a run should cost by the papers' formulas, in bits (HFLDD, eq. 3, 18, 19; FedHEAD)."""

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


def hfldd_bits(
    *,
    num_clients: int,
    num_auxiliary: int,
    num_classes: int,
    distilled_values: int,
    num_heads: int,
    num_weights: int,
    num_rounds: int,
) -> int:
    """Traffic of HFLDD: soft labels, distilled data and the heads' training (HFLDD, eq. 18).

    ``N |D_g| N_c B_1 + sum over members of |D~_i| B_2 + H |w| (2T - 1) B_1``

    Parameters
    ----------
    num_clients : int
        N, the clients that send soft labels.
    num_auxiliary : int
        |D_g|, samples of the global auxiliary set.
    num_classes : int
        N_c.
    distilled_values : int
        Pixels of all distilled samples that members send to their heads.
    num_heads : int
        H, the cluster heads.
    num_weights : int
        |w|, the values of the model.
    num_rounds : int
        T.
    """
    return (
        num_clients * num_auxiliary * num_classes * BITS_PER_FLOAT
        + distilled_values * BITS_PER_PIXEL
        + fedavg_bits(num_heads, num_weights, num_rounds)
    )


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


def fedseq_bits(num_superclients: int, num_weights: int, num_rounds: int, clients_each: int) -> int:
    """Traffic of FedSeq: ``O |w| B_1 ((2T - 1) + T J)`` (HFLDD, eq. 19).

    Parameters
    ----------
    num_superclients : int
        O, the superclients.
    num_weights : int
        |w|, the values of the model.
    num_rounds : int
        T.
    clients_each : int
        J, the clients that a superclient passes the model through each round.
    """
    rounds = (2 * num_rounds - 1) + num_rounds * clients_each
    return num_superclients * num_weights * BITS_PER_FLOAT * rounds
