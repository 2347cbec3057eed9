"""What a strategy leaves out of a mean is in the journal, as what the grid rejects is."""

import numpy as np
import pytest
from flwr.app import MetricRecord, RecordDict

from flwr_distill.protocol.arrays import as_record
from flwr_distill.server.record.journal import Journal
from flwr_distill.strategies.agreement.strategy import Agreement
from flwr_distill.strategies.cadis import CADIS
from flwr_distill.strategies.moon.strategy import MOON
from tests.grids import screening_grid
from tests.server.run_folder import journal as journal_of

FIRST = 2**64 - 1000  # as in conftest.py
START = {"last.weight": np.zeros((4, 5), np.float32)}


def node(place, factor):
    """A node that moves in the direction of the others, or in another one."""
    move = 1 + 0.1 * np.random.default_rng(place).normal(size=(4, 5))
    content = {"arrays": as_record({"last.weight": (factor * move).astype(np.float32)})}
    metrics = MetricRecord({"num-examples": 10, "train-loss": 0.5})
    return lambda message: RecordDict({**content, "metrics": metrics})


STRATEGIES = {
    "agreement": lambda: Agreement(fraction_evaluate=0.0),
    "as aggregator": lambda: MOON(fraction_evaluate=0.0, aggregator=Agreement()),
    "cadis": lambda: CADIS(fraction_evaluate=0.0, rule="agreement", most_say=1.0),
}


@pytest.mark.parametrize("factor", [-1.0, 60.0])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_whom_a_rule_leaves_out_is_named_with_the_reason_and_counted(
    memory_grid, tmp_path, strategy, factor
):
    nodes = {FIRST + place: node(place, factor if place == 7 else 1.0) for place in range(8)}
    journal = Journal(tmp_path / "journal.jsonl")
    grid = screening_grid(memory_grid(nodes), deadline=60, journal=journal)
    journal.round = 1
    STRATEGIES[strategy]().start(grid=grid, initial_arrays=as_record(START), num_rounds=2)
    entries = journal_of(tmp_path, "set_aside")
    assert {(line["set_aside"], line["reply_to"]) for line in entries} == {
        (str(FIRST + 7), "train")
    }
    assert all(line["reason"] for line in entries)
    assert journal.set_aside == len(entries)
