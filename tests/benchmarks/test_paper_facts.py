"""The papers' facts: all printed cells are there, and HFLDD's equations give its traffic."""

import pytest

from benchmarks.papers.facts import read_facts
from flwr_distill.strategies.common.traffic import fedavg_bits, fedseq_bits
from flwr_distill.strategies.hfldd.traffic import hfldd_bits

FACTS = read_facts()
CLIENTS, SOFT_LABELS, DISTILLED = 100, 1000, 400
WEIGHTS = {"III": 44_426, "IV": 1_020_160, "V": 320_010}
VALUES = {"III": 784, "IV": 3072, "V": 3072}
"""Of an image."""


def test_all_printed_cells_of_all_results_tables_are_there():
    tables = [table for facts in FACTS.values() for table in facts.tables]
    assert len(tables) == 21
    assert sum(len(table.cells) for table in tables) == 722


def test_places_and_numbers_of_cells_are_distinguished():
    reached = FACTS["cadis"].results("II").cells[0]
    assert reached.place == {"dataset": "PILL", "accuracy": 60, "method": "FedAvg"}
    assert reached.numbers == {"rounds": 74, "reached": True}
    traffic = FACTS["hfldd"].results("III").cells[0]
    assert traffic.place == {"method": "HFLDD"}
    assert traffic.numbers == {"rounds": 5, "accuracy": 80.63, "traffic_mb": 58.8, "ratio": 1.0}
    with_deviation = FACTS["fedhead"].results("2").cells[0]
    assert with_deviation.numbers == {"value": 70.24, "deviation": 0.04}


def test_no_two_cells_of_a_table_have_the_same_place():
    for facts in FACTS.values():
        for table in facts.tables:
            places = [tuple(sorted(cell.place.items())) for cell in table.cells]
            assert len({*places}) == len(places), f"{facts.paper['name']}, {table.number}"


def heads(table):
    """Clusters that HFLDD's traffic implies, as the facts derive them."""
    stated = FACTS["hfldd"].model_extra["derived"]["H"]
    (clusters,) = (each["clusters"] for each in stated if each["dataset"] == table.dataset)
    return clusters


def traffic(table, method, rounds):
    """Bits by eq. 3, 18 or 19 until a round, counted from 0."""
    weights, total = WEIGHTS[table.number], rounds + 1
    if method == "FedSeq":
        return fedseq_bits(10, weights, total, clients_each=10)
    if method != "HFLDD":
        return fedavg_bits(CLIENTS, weights, total)
    return hfldd_bits(
        num_clients=CLIENTS,
        num_auxiliary=SOFT_LABELS,
        num_classes=10,
        distilled_values=(CLIENTS - heads(table)) * DISTILLED * VALUES[table.number],
        bits_per_value=8,
        num_heads=heads(table),
        num_weights=weights,
        num_rounds=total,
    )


@pytest.mark.parametrize("number", ["III", "IV", "V"])
def test_equations_3_18_and_19_give_the_printed_traffic(number):
    table = FACTS["hfldd"].results(number)
    assert len(table.cells) == 5
    for cell in table.cells:
        bits = traffic(table, cell.place["method"], cell.numbers["rounds"])
        assert bits / 8 / 2**20 == pytest.approx(cell.numbers["traffic_mb"], abs=0.1), cell.place
