"""The papers' tables: their settings hold, a cell runs end to end, and what was run is kept."""

import json
import sys

import pytest

from benchmarks import papers
from flwr_distill.server.settings import RunSettings
from flwr_distill.task.datasets.corruptions import _CORRUPTIONS, PREFIX

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
        "train.local-epochs": 1,
        "fedhead.sectors": 1,
    },
    rows=(
        papers.Row(
            name="MC",
            preset="cadis-mnist",
            paper={"CADIS": papers.Value(value=90.0, source="a page")},
        ),
    ),
)


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """Print the tiny table's quick runs; returns what stands in its JSON."""
    monkeypatch.setattr(papers, "read_tables", lambda: {"tiny": TINY})

    def ask(*options, out=tmp_path, workers=1):
        file = tmp_path / "cells.json"
        words = ["papers", "tiny", "--quick", "--out", str(out), "--json", str(file), *options]
        words += ["--workers", str(workers)]
        monkeypatch.setattr(sys, "argv", words)
        papers.main()
        return json.loads(file.read_text())["cells"]

    return ask


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_cell_has_settings_that_a_run_takes(table):
    cells = [cell for quick in (False, True) for cell in table.cells(quick=quick)]
    assert bool(table.missing) == (not cells)
    for cell in cells:
        settings = RunSettings.from_run_config(cell.ours)
        assert (settings.dataset == "private") == bool(table.nodes)
        assert len(table.node_configs(cell)) == (len(table.nodes) or settings.min_nodes)
    assert {method for row in table.rows for method in row.paper} <= set(table.methods)


def test_each_corruption_is_the_domain_of_one_node():
    nodes = TABLES["fedlgd-cifar10c"].nodes
    assert sorted(nodes) == sorted(f"{PREFIX}{corruption}-3" for corruption in _CORRUPTIONS)


def test_a_table_is_printed_with_its_differences_and_goes_on_where_ctrl_c_ended_it(
    tiny, monkeypatch, capsys
):
    run, started = papers.run_in_process, []

    def interrupted(config, nodes, folder, wrap):
        started.append((config["strategy"], config["resume"]))
        if len(started) == 2:
            run({**config, "num-rounds": 1}, nodes, folder, wrap)
            raise KeyboardInterrupt
        return run(config, nodes, folder, wrap)

    monkeypatch.setattr(papers, "run_in_process", interrupted)
    assert [len(line["by_round"]) for line in tiny()] == [3, 2]
    lines = tiny()
    assert started == [("fedavg", ""), ("cadis", ""), ("cadis", "latest")]
    assert tiny() == lines
    assert len(started) == 3

    fedavg, cadis = lines
    assert [len(line["by_round"]) for line in lines] == [3, 3]
    assert [line["by_round"][-1] for line in lines] == [line["ours"] for line in lines]
    assert all(0 < line["seconds"]["train"] < line["seconds"]["all"] for line in lines)
    assert (fedavg["paper"], cadis["paper"], cadis["source"]) == (None, 90.0, "a page")
    assert 0 < fedavg["ours"] < 100
    assert "num-rounds 2, not 500; min-nodes 4, not 100" in cadis["difference"]
    assert "1,437 training samples, not 60,000" in cadis["difference"]
    assert "fedhead" not in cadis["difference"]
    printed = capsys.readouterr().out
    assert "all cells: the data are digits" in printed
    assert "paper: a page" in printed


def test_a_cell_that_ran_out_of_time_is_continued_and_gives_what_it_gives_at_once(
    tiny, monkeypatch, tmp_path
):
    cell = ["--row", "MC", "--method", "CADIS"]
    assert tiny(*cell, "--seconds", "0") == []
    rounds = []

    def late():  # once the first round is over
        (folder,) = tmp_path.glob("tiny/*")
        rounds.append(papers.rounds_done(folder))
        return float("inf") if rounds[-1] == 1 else 0.0

    with monkeypatch.context() as patch:
        patch.setattr(papers.time, "monotonic", late)
        (part,) = tiny(*cell, "--seconds", "100")
    assert len(part["by_round"]) == 2
    (whole,) = tiny(*cell)
    assert whole["by_round"][:2] == part["by_round"]
    assert len(whole["by_round"]) == 3


def test_a_row_or_method_that_a_table_does_not_have_is_refused_with_those_it_has(tiny, capsys):
    with pytest.raises(SystemExit):
        tiny("--method", "FedNone")
    assert "FedAvg, CADIS" in capsys.readouterr().err


def test_what_is_missing_is_said_before_anything_runs(monkeypatch, capsys, tmp_path):
    for name in ("fedhead-svhn", "hfldd-cinic10"):
        monkeypatch.setattr(sys, "argv", ["papers", name, "--data-root", str(tmp_path)])
        with pytest.raises(SystemExit):
            papers.main()
    reason = capsys.readouterr().err
    assert "fedhead-svhn cannot be run here: no files of svhn in --data-root" in reason
    assert "hfldd-cinic10 cannot be run here: CINIC-10" in reason


@pytest.mark.slow
def test_workers_give_the_accuracies_of_one_process(tiny, tmp_path):
    cell = ["--row", "MC", "--method", "CADIS"]
    (one,) = tiny(*cell)
    (two,) = tiny(*cell, out=tmp_path / "workers", workers=2)
    assert two["by_round"] == one["by_round"]
    assert 0 < two["seconds"]["train"] < two["seconds"]["all"]
