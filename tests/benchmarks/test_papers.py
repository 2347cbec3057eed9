"""The papers' tables: they are whole, their settings hold, and a run of one is kept and read."""

import json
import re
import sys
from dataclasses import replace

import pytest
from pydantic import ValidationError

from benchmarks.in_process import FIRST_NODE
from benchmarks.papers import command as papers
from benchmarks.papers.facts import Cell, read_facts
from benchmarks.papers.plots import running_means
from benchmarks.papers.runs import METRICS, Result, rounds_to, run_row
from benchmarks.papers.tables import Row, Table, read_tables
from flwr_distill.server.settings import RunSettings
from flwr_distill.task.datasets.corruptions import _CORRUPTIONS, PREFIX

TABLES = read_tables()
DIGITS = {
    "dataset": "digits",
    "model": "mlp",
    "num-rounds": 2,
    "min-nodes": 4,
    "fraction-train": 0.5,
    "partition.scheme": "iid",
    "train.local-epochs": 1,
    "fedhead.sectors": 1,
}
TINY = Table(
    name="tiny",
    title="digits",
    differs="the data are digits",
    preset="cadis-mnist",
    small=DIGITS,
    small_reason="they come with a package",
    axes={
        "method": {
            "FedAvg": {"strategy": "fedavg", "samples": 60_000},
            "CADIS": {"samples": 60_000},
            "SingleSet": {"missing": "no centralised learning"},
        }
    },
)


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """Print the tiny table's small runs; returns what stands in its JSON."""
    monkeypatch.setattr(papers, "read_tables", lambda: {"tiny": TINY})

    def ask(*options, out=tmp_path, workers=1):
        file = tmp_path / "rows.json"
        words = ["papers", "tiny", "--small", "--out", str(out), "--json", str(file), *options]
        words += ["--workers", str(workers)]
        monkeypatch.setattr(sys, "argv", words)
        papers.main()
        return json.loads(file.read_text())["rows"]

    return ask


def test_every_results_table_and_figures_5_to_7_of_hfldd_have_a_command():
    named = {(table.paper, table.facts) for table in TABLES.values()}
    tables = {(name, table.number) for name, own in read_facts().items() for table in own.tables}
    assert tables | {("hfldd", f"figure {number}") for number in (5, 6, 7)} <= named


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_row_has_settings_that_a_run_takes(table):
    rows = [row for small in (False, True) for row in table.rows(small=small)]
    for row in {json.dumps(row.ours): row for row in rows if not row.missing}.values():
        settings = RunSettings.from_run_config(row.ours)
        assert (settings.dataset == "private") == bool(table.clients)
        assert len(row.nodes) == settings.min_nodes


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_the_small_setting_keeps_rows_apart_that_differ(table):
    rows = [row for row in table.rows(small=True) if not row.missing]
    full_of: dict[str, str] = {}
    for row in rows:
        full = json.dumps(row.full)
        assert full_of.setdefault(json.dumps(row.ours), full) == full


@pytest.mark.parametrize("name", ["real-blood-cells", "real-heart-disease"])
def test_each_site_is_a_node_and_pooling_has_one(name):
    nodes = {row.place["method"]: len(row.nodes) for row in TABLES[name].rows(small=False)}
    assert {method for method, number in nodes.items() if number == 1} == {"pooled"}
    assert {*nodes.values()} == {1, 4}


def test_a_rows_paths_are_below_the_data_root_and_indices_can_be_made(monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.papers.blood_cells.sites", lambda root: {"0": [len(str(root))]})
    given = {}
    monkeypatch.setattr(
        "benchmarks.papers.runs.run_in_process", lambda config, *rest: given.update(config)
    )
    row = Row(Cell.model_construct(place={}, numbers={}), (), {}, {"seed": 0}, [{}])
    for own, expected in (
        ({"data-root": "hospitals", "partition.index-file": "sites.json"}, "root/hospitals"),
        ({"partition.index-file": "benchmarks.papers.blood_cells:sites"}, "root"),
        ({}, "root"),
    ):
        run_row(replace(row, ours={"seed": 0, **own}), 0, tmp_path, "root", lambda: None, 1)
        assert given["data-root"] == expected
    assert not given["partition.index-file"]
    assert json.loads((tmp_path / "indices.json").read_text()) == {"0": [len("root")]}


def test_each_corruption_is_the_domain_of_a_node():
    nodes = TABLES["fedlgd-6"].rows(small=False)[0].nodes
    made = {f"{PREFIX}{corruption}-3" for corruption in _CORRUPTIONS}
    assert made <= {str(node["dataset"]) for node in nodes}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"axes": {}}, "method"),
        ({"axes": {"method": {"CADIS": {}}}}, "FedAvg"),
        ({"small": {"num-rounds": 1}}, "small_reason"),
    ],
    ids=["without an axis", "without a method", "without a reason"],
)
def test_a_table_that_is_not_whole_is_refused(changes, reason):
    whole = {"paper": "hfldd", "facts": "III", "preset": "hfldd-mnist"}
    methods = ("HFLDD", "FedAvg", "FedProx", "FedSeq", "DynaFed")
    whole["axes"] = {"method": {method: {} for method in methods}}
    assert len(Table(**whole).rows(small=False)) == 5
    with pytest.raises(ValidationError, match=reason):
        Table(**whole | changes)


def test_what_depends_on_several_keys_wins_over_axes_and_must_fit_a_cell():
    axes = {"C": {"1": {"seed": 1}, "2": {"seed": 2}}, "method": {"CADIS": {}, "FedAvg": {}}}
    case = {"place": {"C": 2, "method": "FedAvg"}, "seed": 3}
    table = {"name": "own", "preset": "cadis-mnist", "axes": axes, "cases": [case]}
    seeds = [row.full["seed"] for row in Table(**table).rows(small=False)]
    assert seeds == [1, 1, 2, 3]
    for wrong in ({"place": {"C": 3}}, {**case, "small": {"seed": 4}}):
        with pytest.raises(ValidationError):
            Table(**table | {"cases": [wrong]})


def test_columns_of_clients_are_read_off_one_run(monkeypatch, tmp_path):
    table = Table(
        paper="fedlgd",
        facts="7",
        preset="fedlgd-digits",
        axes={"start": {start: {} for start in ("N(0,1)", "N(mu_i,sigma_i)", "real images")}}
        | {"method": {"FedLGD": {"strategy": "fedavg"}}},
        clients={"MNIST": {"dataset": "digits"}, "USPS": {"dataset": "benchmarks.domains:digits"}}
        | {name: {"missing": "none here"} for name in ("SVHN", "SynthDigits", "MNIST-M")},
        small={"num-rounds": 1, "model": "mlp", "private.shape": "1x8x8"},
        small_reason="they come with a package",
    )
    rows = [r for r in table.rows(small=True) if r.place["start"] == "real images"]
    able = [row for row in rows if not row.missing]
    assert [row.place["client"] for row in able] == ["MNIST", "USPS", "Average"]
    assert len({row.folder(tmp_path, 0) for row in able}) == 1
    assert able[0].differs == "2 of 5 clients"
    papers.run_row(able[0], 0, able[0].folder(tmp_path, 0), "", lambda: None, 1)
    lines = papers.lines_of(table, rows, [0], tmp_path, "")
    values = [line["ours"]["value"]["mean"] for line in lines if not line["missing"]]
    journal = (able[0].folder(tmp_path, 0) / "1" / "journal.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in journal]
    (nodes,) = (line["nodes"] for line in entries if line.get("phase") == "evaluate")
    shares = [nodes[str(FIRST_NODE + place)]["eval-accuracy"] for place in (0, 1)]
    assert shares[0] != shares[1]
    assert values[:2] == [round(100 * share, 2) for share in shares]
    assert values[2] == pytest.approx(sum(values[:2]) / 2, abs=0.01)
    assert sum(line["paper"]["value"] > 0 for line in lines if line["missing"]) == 3


def test_a_table_is_printed_with_its_differences_and_continues_where_ctrl_c_ended_it(
    tiny, monkeypatch, capsys, tmp_path
):
    from benchmarks.papers import runs as paper_runs

    run, started = paper_runs.run_in_process, []

    def interrupted(config, nodes, folder, wrap):
        started.append((config["strategy"], config["resume"]))
        if len(started) == 2:
            run({**config, "num-rounds": 1}, nodes, folder, wrap)
            raise KeyboardInterrupt
        return run(config, nodes, folder, wrap)

    monkeypatch.setattr(paper_runs, "run_in_process", interrupted)
    assert [line["rounds"] for line in tiny()] == [[2], [1], []]
    assert len(list(tmp_path.glob("*/nodes"))) == 1  # of the interrupted run
    lines = tiny()
    assert not list(tmp_path.glob("*/nodes"))
    assert started == [("fedavg", ""), ("cadis", ""), ("cadis", "latest")]
    assert tiny() == lines
    assert len(started) == 3

    fedavg, cadis, single = lines
    assert [line["by_round"]["0"][-1] for line in (fedavg, cadis)] == [
        line["ours"]["value"]["mean"] for line in (fedavg, cadis)
    ]
    assert all(
        0 < line["seconds"]["0"]["train"] < line["seconds"]["0"]["all"] for line in lines[:2]
    )
    assert (single["ours"], single["missing"]) == ({}, "no centralised learning")
    assert {"num-rounds 2, not 500", "min-nodes 4, not 100"} < {*cadis["differences"]}
    assert "1,437 training samples, not 60,000" in cadis["differences"]
    assert not any("fedhead" in text for text in cadis["differences"])
    printed = capsys.readouterr().out
    assert "all rows: the data are digits" in printed
    assert "they come with a package" in printed


def test_rows_of_several_seeds_have_their_mean_and_deviation(tiny, tmp_path):
    (one,) = tiny("--where", "method=FedAvg", "--seeds", "1")
    (both,) = tiny("--where", "method=FedAvg", "--seeds", "0", "1")
    value = both["ours"]["value"]
    assert value["by_seed"][1] == one["ours"]["value"]["mean"] != value["by_seed"][0]
    assert value["mean"] == pytest.approx(sum(value["by_seed"]) / 2)
    assert value["deviation"] > 0
    assert one["ours"]["value"]["deviation"] is None


def test_a_row_that_ran_out_of_time_is_continued_and_gives_what_it_gives_at_once(
    tiny, monkeypatch, tmp_path
):
    row = ["--where", "method=CADIS"]
    assert tiny(*row, "--seconds", "0")[0]["rounds"] == []
    rounds = []

    def late():  # once the first round is over
        rounds.append(sum(Result(folder).rounds for folder in tmp_path.glob("cadis*")))
        return float("inf") if rounds[-1] == 1 else 0.0

    with monkeypatch.context() as patch:
        patch.setattr(papers.time, "monotonic", late)
        (part,) = tiny(*row, "--seconds", "100")
    assert part["rounds"] == [1]
    (whole,) = tiny(*row)
    assert whole["by_round"]["0"][:2] == part["by_round"]["0"]
    assert whole["rounds"] == [2]


def test_a_row_is_found_by_each_value_as_it_is_printed():
    for table in TABLES.values():
        for row in table.rows(small=False):
            assert row.matches({key: {str(value)} for key, value in row.place.items()})


def test_a_row_that_a_table_does_not_have_is_refused_with_those_it_has(tiny, capsys):
    with pytest.raises(SystemExit):
        tiny("--where", "method=FedNone")
    assert "CADIS, FedAvg" in capsys.readouterr().err


def test_what_cannot_run_here_stays_visible_with_the_papers_value(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("COLUMNS", "200")
    for name, value, why in (
        ("fedhead-7", "77.53 ± 0.04", "no files of svhn"),
        ("fedlgd-3", "69.4", "hospitals"),
    ):
        options = ["--data-root", str(tmp_path), "--out", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", ["papers", name, *options])
        papers.main()
        assert re.search(rf"{re.escape(value)} .*cannot run here: .*{why}", capsys.readouterr().out)
    assert not (tmp_path / "out").exists()


def test_a_figure_is_drawn_and_has_the_numbers_of_the_text(monkeypatch, tmp_path):
    table = TABLES["hfldd-figure-3"]
    stated = [row.cell.numbers["value"] for row in table.rows(small=False) if row.cell.numbers]
    assert sorted(stated) == sorted(c.numbers["value"] for c in table.results().cells)
    figure = TINY.model_copy(update={"plot": "accuracy", "running": 2})
    monkeypatch.setattr(papers, "read_tables", lambda: {"tiny": figure})
    words = ["papers", "tiny", "--small", "--out", str(tmp_path), "--workers", "1"]
    monkeypatch.setattr(sys, "argv", [*words, "--where", "method=FedAvg"])
    papers.main()
    assert (tmp_path / "tiny-small.png").read_bytes()[:4] == b"\x89PNG"


def test_metrics_of_a_series():
    series = [10.0, 90.0, *[50.0] * 9, 60.0]
    assert {name: metric(series) for name, metric in METRICS.items()} == {
        "last": 60.0,
        "best": 90.0,
        "last-ten": 51.0,
    }
    assert [rounds_to([None, 10.0, 50.0], target) for target in (10, 11, 51)] == [1, 2, None]


def test_a_running_mean_is_that_of_the_last_rounds_so_far():
    assert running_means([1.0, 3.0, 5.0, 1.0], 2) == [1.0, 2.0, 4.0, 3.0]
    assert running_means([1.0, 3.0], 1) == [1.0, 3.0]


def test_speed_and_traffic_are_compared_with_the_reference_at_the_same_place():
    table = TINY.model_copy(update={"relative_to": "FedAvg"})
    places = [("CADIS", 80), ("FedAvg", 80), ("FedAvg", 90), ("CADIS", 90)]
    rows = [Row(Cell.model_construct(place={"method": m, "accuracy": a}), ()) for m, a in places]
    numbers = [
        {"rounds": 5, "traffic_mb": 1.0},
        {"rounds": 10, "traffic_mb": 4.0},
        {"rounds": 30, "traffic_mb": 9.0},
        {"rounds": None, "traffic_mb": None},
    ]
    papers.compared(table, rows, numbers)
    assert [each.get("speedup") for each in numbers] == [2.0, 1.0, 1.0, None]
    assert [each.get("ratio") for each in numbers] == [0.25, 1.0, 1.0, None]


@pytest.mark.parametrize("strategy", ["fedavg", "hfldd", "fedseq"])
def test_traffic_until_a_round_is_that_of_a_run_of_so_many(strategy, tmp_path):
    small = {**DIGITS, "strategy": strategy, "hfldd.groups": 2, "hfldd.distill-steps": 2}
    small |= {"hfldd.auxiliary-size": 20, "hfldd.initial-steps": 2, "hfldd.distilled-size": 4}
    small |= {"fraction-train": 1.0, "fedseq.cluster-size": 2}
    small |= {"hfldd.auxiliary": "noise", "hfldd.formation": 1, "hfldd.rotate": False}
    row = TINY.model_copy(update={"small": small}).rows(small=True)[1]
    results = []
    for rounds in (2, 1):
        folder = tmp_path / str(rounds)
        papers.run_row(
            Row(row.cell, (), row.full, {**row.ours, "num-rounds": rounds}, row.nodes),
            *(0, folder, "", lambda: None, 1),
        )
        results.append(Result(folder))
    longer, shorter = results
    assert longer.formula_bytes(1) == shorter.formula_bytes(1) < longer.formula_bytes(2)
    file = shorter.folder / "1" / "traffic.json"
    stated = json.loads(file.read_text())["formulas"]
    (own,) = (size for name, size in stated.items() if name.startswith(f"{strategy} "))
    assert shorter.formula_bytes(1) == own
    assert 0 < longer.measured_bytes(1) < longer.measured_bytes(2)


@pytest.mark.slow
def test_workers_give_the_accuracies_of_one_process(tiny, tmp_path):
    row = ["--where", "method=CADIS"]
    (one,) = tiny(*row)
    (two,) = tiny(*row, out=tmp_path / "workers", workers=2)
    assert two["by_round"] == one["by_round"]
    assert 0 < two["seconds"]["0"]["train"] < two["seconds"]["0"]["all"]
