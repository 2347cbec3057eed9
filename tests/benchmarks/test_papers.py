"""The papers' tables: their settings hold, a cell runs end to end, and what was run is kept."""

import json
import sys

import pytest

from benchmarks import papers
from server.settings import RunSettings
from task.datasets import load_dataset
from task.datasets.corruptions import PREFIX, corrupted

TABLES = papers.read_tables()
TINY = papers.Table(
    name="tiny",
    title="digits",
    differs="the data are digits",
    data=("digits",),
    samples=60_000,
    methods={"FedAvg": {"strategy": "fedavg"}, "CADIS": {}},
    quick={
        "dataset": "digits",
        "model": "mlp",
        "num-rounds": 2,
        "min-nodes": 4,
        "fraction-train": 0.5,
        "partition.scheme": "iid",
    },
    rows=(
        papers.Row(
            name="MC",
            preset="cadis-mnist-mc",
            paper={"CADIS": papers.Value(value=90.0, source="a page")},
        ),
    ),
)


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """Print the tiny table's quick runs; returns what stands in its JSON."""
    monkeypatch.setattr(papers, "read_tables", lambda: {"tiny": TINY})

    def ask(*options):
        file = tmp_path / "cells.json"
        words = ["papers", "tiny", "--quick", "--out", str(tmp_path), "--json", str(file)]
        monkeypatch.setattr(sys, "argv", [*words, *options])
        papers.main()
        return json.loads(file.read_text())["cells"]

    return ask


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("quick", [False, True])
def test_every_cell_has_settings_that_a_run_takes(table, quick):
    cells = list(table.cells(quick=quick))
    assert bool(table.missing) == (not cells)
    for cell in cells:
        settings = RunSettings.from_run_config(cell.ours)
        assert (settings.dataset == "private") == bool(table.nodes)
        assert len(table.node_configs(cell)) == (len(table.nodes) or settings.min_nodes)
    assert {method for row in table.rows for method in row.paper} <= set(table.methods)


def test_domains_of_tables_are_data_sets(clean_cifar10):
    names = [name for table in TABLES.values() for name in table.nodes if name.startswith(PREFIX)]
    assert len({*names}) == len(names) == 10
    for name in names:
        assert len(corrupted(clean_cifar10, name).train) == 1


@pytest.fixture
def clean_cifar10():
    digits = load_dataset("digits")
    one = digits.train.subset([0])
    colour = type(one)(one.images.repeat(3, 1).repeat(4, 2).repeat(4, 3), one.labels)
    return type(digits)(digits.spec, colour, colour)


def test_a_table_says_what_the_paper_has_what_we_have_and_what_differs(tiny, capsys):
    fedavg, cadis = tiny()
    assert (fedavg["paper"], cadis["paper"], cadis["source"]) == (None, 90.0, "a page")
    assert 0 < fedavg["ours"] < 100
    assert "num-rounds 2, not 500; min-nodes 4, not 100" in cadis["difference"]
    assert "1,437 training samples, not 60,000" in cadis["difference"]
    printed = capsys.readouterr().out
    assert "all cells: the data are digits" in printed
    assert "paper: a page" in printed


def test_finished_cells_are_kept_and_an_interrupted_one_goes_on_after_its_last_round(
    tiny, monkeypatch
):
    run, asked = papers.run_in_process, []

    def interrupted(config, nodes, folder, wrap):
        asked.append((config["strategy"], config["resume"]))
        if len(asked) == 2:
            run({**config, "num-rounds": 1}, nodes, folder, wrap)
            raise KeyboardInterrupt
        return run(config, nodes, folder, wrap)

    monkeypatch.setattr(papers, "run_in_process", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiny()
    first = tiny()
    assert asked == [("fedavg", ""), ("cadis", ""), ("cadis", "latest")]
    assert tiny() == first
    assert len(asked) == 3


def test_what_is_missing_is_said_before_anything_runs(monkeypatch, capsys, tmp_path):
    for words in (["fedhead-svhn"], ["hfldd-cinic10"]):
        monkeypatch.setattr(sys, "argv", ["papers", *words, "--data-root", str(tmp_path)])
        with pytest.raises(SystemExit):
            papers.main()
    said = capsys.readouterr().err
    assert "fedhead-svhn cannot be run here: no files of svhn in --data-root" in said
    assert "hfldd-cinic10 cannot be run here: CINIC-10" in said
