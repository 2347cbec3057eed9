"""Counts of held-out samples from worker processes, through the guard of each node's policy."""

import pytest

from flwr_distill.node.outbox import FOLDER, entries
from flwr_distill.node.policy import STANDARD, Policy
from flwr_distill.server.page.numbers import best, best_metric
from flwr_distill.server.page.run_files import read_run
from flwr_distill.simulation.run import simulate

CONFIG = {
    "strategy": "fedavg",
    "num-rounds": 2,
    "partition.scheme": "dirichlet",
    "partition.min-of-a-class": 20,
    "train.local-epochs": 1,
    "train.holdout": 0.3,
    "fraction-evaluate": 1.0,
    "evaluate.counts": True,
}
NODES = [{"num-partitions": 3, "device": "cpu"}] * 3
ALLOWED = STANDARD.model_copy(update={"counts": "allowed", "fewest_held_out_of_a_class": 1})
NOISY = Policy(
    replies="declared", least_noise=0.5, holdout=0.3, counts_epsilon=4.0, counts="allowed"
)


@pytest.mark.slow
def test_nodes_counts_reach_the_report_and_choose_the_best_round(tmp_path):
    own = {"train.class-weights": "balanced", "best-metric": "balanced-accuracy"}
    run = read_run(simulate({**CONFIG, **own}, NODES, tmp_path, workers=2, policy=ALLOWED))
    nodes = run.rows[-1]["node_scores"]
    assert nodes["nodes"] == 3
    assert all(0 <= nodes[key] <= 1 for key in ("balanced_accuracy", "macro_f1", "auroc", "ece"))
    assert best(run.rows, best_metric(run))["balanced_accuracy"] == max(
        row["balanced_accuracy"] for row in run.rows
    )
    report = (run.folder / "report.html").read_text()
    assert "all nodes that sent counts" in report
    assert all(name in report for name in run.names.values())
    lines = list(entries(tmp_path / "nodes" / "node-0" / FOLDER))
    assert any("confusion" in what for line in lines for what in line.get("what", []))


@pytest.mark.slow
def test_under_differential_privacy_nodes_put_noise_on_them_and_book_it(tmp_path):
    own = {"train.dp-noise": 0.5, "num-rounds": 1}
    run = read_run(simulate({**CONFIG, **own}, NODES, tmp_path, workers=2, policy=NOISY))
    nodes = run.rows[-1]["node_scores"]
    assert (nodes["nodes"], nodes["auroc"]) == (3, None)
    assert 0 <= nodes["balanced_accuracy"] <= 1
    last = list(entries(tmp_path / "nodes" / "node-0" / FOLDER))[-1]
    assert "counts: confusion" in last["what"]
    before = [e["lifetime"] for e in entries(tmp_path / "nodes" / "node-0" / FOLDER)][-2]
    assert last["lifetime"] == pytest.approx(before + 4.0)
