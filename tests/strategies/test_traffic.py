"""The papers' traffic formulas, against their sums written out message by message."""

from flwr_distill.strategies.common.traffic import fedavg_bits, fedseq_bits
from flwr_distill.strategies.fedhead.strategy import fedhead_bits
from flwr_distill.strategies.hfldd.traffic import hfldd_bits


def test_fedavg_formula_counts_every_transfer_but_the_last_rounds_way_down():
    bits = 0
    for server_round in range(1, 31):
        for _client in range(100):
            bits += 44_426 * 32  # up
            if server_round < 30:
                bits += 44_426 * 32  # down again for the next round
    assert fedavg_bits(100, 44_426, 30) == bits


def test_hfldd_formula_adds_soft_labels_and_distilled_data_to_the_heads_training():
    soft_labels = sum(1000 * 10 * 32 for _client in range(100))
    distilled = sum(400 * 28 * 28 * 4 for _member in range(90))
    assert hfldd_bits(
        num_clients=100,
        num_auxiliary=1000,
        num_classes=10,
        distilled_values=90 * 400 * 28 * 28,
        bits_per_value=4,
        num_heads=10,
        num_weights=44_426,
        num_rounds=300,
    ) == soft_labels + distilled + fedavg_bits(10, 44_426, 300)


def test_fedhead_formula_counts_two_round_trips_of_each_leader():
    bits = 0
    for _round in range(10):
        for _leader in range(2):
            bits += 44_426 * 32 + 44_426 * 32  # w down, w_m up
            bits += 44_426 * 32 + 44_426 * 32  # z down, z_m up
    assert fedhead_bits(2, 44_426, 10) == bits


def test_fedseq_formula_adds_a_hop_for_each_client_of_a_superclient():
    bits = 0
    for server_round in range(1, 6):
        for _superclient in range(3):
            bits += 7 * 32 * (2 if server_round < 5 else 1)
            bits += 7 * 32 * 4
    assert fedseq_bits(3, 7, 5, clients_each=4) == bits
