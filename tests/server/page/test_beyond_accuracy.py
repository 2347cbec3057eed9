"""The section on metrics besides accuracy: of the server's test samples, else of nodes' counts."""

from dataclasses import asdict
from types import SimpleNamespace

import pytest

from flwr_distill.server.hooks import RoundRow
from flwr_distill.server.page.beyond_accuracy import beyond_accuracy

SCORES = {"balanced_accuracy": 0.61, "macro_f1": 0.52, "auroc": 0.83, "ece": 0.24}


def row(number, *, tested):
    """A round's row as in ``metrics.jsonl``, which has every key."""
    nodes = {"nodes": 3, "samples": 90, **SCORES}
    of_server = SCORES if tested else {}
    row = RoundRow(number, None, None, 0, 0, 0.0, node_scores=nodes, **of_server)
    return asdict(row)


@pytest.mark.parametrize("tested", [True, False])
def test_curves_are_of_the_servers_test_samples_else_of_the_nodes(tested):
    rows = [row(number, tested=tested) for number in range(3)]
    run = SimpleNamespace(rows=rows, evaluated="", class_name=str)
    curves = beyond_accuracy(run).figures[0]
    assert "balanced accuracy at 61.0 %, macro F1 at 52.0 %, AUROC at 83.0 %" in curves.caption
