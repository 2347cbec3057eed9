"""The report of a whole run of our ServerApp with our ClientApp; only the wire is in memory."""

import json
from pathlib import Path

import pytest

from flwr_distill.distill.privacy import Closeness, PrivacyCard, Yardstick
from flwr_distill.server.page.privacy import privacy
from flwr_distill.server.page.run_files import RunFiles, read_run
from flwr_distill.server.page.run_page import run_page
from flwr_distill.task.settings import TaskSettings
from flwr_distill.task.source import partition_samples


@pytest.fixture
def run(play):
    settings = {
        "strategy": "hfldd",
        "fraction-evaluate": 1.0,
        "hfldd.distiller": "dm",
        "hfldd.distill-steps": 3,
        "hfldd.groups": 2,
        "partition.scheme": "iid",
    }
    return read_run(play(settings, nodes=4))


def test_a_run_of_hfldd_tells_all_that_the_report_shows(run):
    asked = {entry["phase"]: entry for entry in run.journal if "phase" in entry}
    clusters = run.topology["clusters"]
    members = {member for cluster in clusters for member in cluster["members"]}
    cards = asked["train.distill"]["nodes"]
    assert {run.name(node) for node in cards} == members
    assert all(-1 <= card["highest-cosine"] <= 1 for card in cards.values())
    assert all(0 < card["audited-ordinary"] <= card["audited-worst"] for card in cards.values())
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
        "formula: hfldd (HFLDD, eq. 18)",
        "members distil their data",
        "In an audit of such virtual data as",
    ):
        assert title in page, title


def test_the_report_tells_what_left_the_nodes_by_the_method_that_auto_took(play):
    settings = {"strategy": "auto", "hfldd.share-raw-data": True, "partition.classes": 4}
    folder = play(settings, num_rounds=1)
    assert json.loads((folder / "choice.json").read_text())["strategy"] == "hfldd"
    assert "members sent their RAW DATA" in (folder / "report.html").read_text()


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


def journal_of(spent):
    """A journal in which each node reports what it has spent, in two rounds."""
    rounds = {1: 0.5, 2: 1.0}
    return [
        {"round": number, "nodes": {str(n): {"dp-epsilon": share * e} for n, e in spent.items()}}
        for number, share in rounds.items()
    ]


@pytest.mark.parametrize(("count", "is_folded"), [(12, False), (13, True)])
def test_the_table_of_epsilons_is_folded_where_there_are_many_nodes(count, is_folded):
    spent = {node: 1.0 + node for node in range(count)}
    settings = {"train": {"dp-delta": 1e-5, "dp-noise": 1.0}}
    about = {"nodes": {str(node): {"name": f"node {node}"} for node in spent}}
    run = RunFiles(Path(), settings, about, [], journal_of(spent), {}, {}, {}, {})
    section = privacy(run)
    (table,) = section.tables
    assert table.rows == [[f"node {node}", f"{1.0 + node:.3g}"] for node in range(count)]
    assert bool(table.folded) == is_folded
    assert f"largest epsilon of {count} nodes is {count:.3g}, at delta = 1e-05" in section.text[0]
