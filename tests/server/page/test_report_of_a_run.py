"""The report of a whole run of our ServerApp with our ClientApp; only the wire is in memory."""

import pytest
from flwr.app import Context, RecordDict

from distill.privacy import Closeness, PrivacyCard, Yardstick
from server.app import main
from server.page import read_run, run_page
from task.settings import TaskSettings
from task.source import partition_samples


@pytest.fixture
def run(client_grid, tmp_path):
    run_config = {
        "strategy": "hfldd",
        "num-rounds": 2,
        "min-nodes": 4,
        "fraction-evaluate": 1.0,
        "train.local-epochs": 1,
        "hfldd.distill-steps": 3,
        "partition.scheme": "iid",
        "runs-dir": str(tmp_path),
    }
    main(client_grid(4, run_config), Context(7, 1, {}, RecordDict(), run_config))
    return read_run(tmp_path / "7")


def test_a_run_of_hfldd_tells_all_that_the_report_shows(run):
    asked = {entry["phase"]: entry for entry in run.journal if "phase" in entry}
    clusters = run.topology["clusters"]
    members = {member for cluster in clusters for member in cluster["members"]}
    cards = asked["train.distill"]["nodes"]
    assert {run.name(node) for node in cards} == members
    assert all(-1 <= card["highest-cosine"] <= 1 for card in cards.values())
    assert all("eval-accuracy" in numbers for numbers in asked["evaluate"]["nodes"].values())
    assert [len(row["class_accuracy"]) for row in run.rows] == [10, 10, 10]
    task = TaskSettings.from_run_config({"partition.scheme": "iid"})
    counts = {f"node-{i}": len(partition_samples(task, i, 4)) for i in range(4)}
    assert {node: sum(of_node) for node, of_node in run.partition.items()} == counts
    page = run_page(run)
    assert (run.folder / "report.html").read_text() == page
    for title in (
        "Accuracy by class",
        "Accuracy on nodes&#39; held-out samples",
        "Clusters",
        "Samples",
        "Virtual data",
        "formula: hfldd (eq. 18)",
        "members distil their data",
        "None: no warning in the log",
    ):
        assert title in page, title


def test_a_card_travels_as_numbers():
    own = Closeness(0.25, 0.5, 0.9, 0.7)
    assert PrivacyCard(own).numbers() == {
        "least-distance": 0.25,
        "median-distance": 0.5,
        "highest-cosine": 0.9,
        "median-cosine": 0.7,
    }
    card = PrivacyCard(own, yardstick=Yardstick(own, nearer_to_own=0.6, by_chance=0.9))
    assert card.numbers().keys() - PrivacyCard(own).numbers().keys() == {
        "nearer-to-own",
        "by-chance",
    }
    assert card.numbers()["by-chance"] == 0.9
