"""The maths of comparing runs, and the words for numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_distill.server.page.comparison_page import (
    common_accuracy,
    comparison_page,
    comparison_tables,
    differing,
    labels,
)
from flwr_distill.server.page.numbers import best, reached
from flwr_distill.server.page.run_files import read_run
from flwr_distill.server.page.words import between, data_size, seconds, spans

accuracies = st.lists(st.none() | st.floats(0, 1), max_size=8)


def rows(values):
    return [{"round": i, "accuracy": value} for i, value in enumerate(values)]


@given(accuracies)
def test_best_is_the_first_row_that_none_exceeds(values):
    known = [value for value in values if value is not None]
    expected = values.index(max(known)) if known else None
    found = best(rows(values))
    assert (found["round"] if found else None) == expected


@given(accuracies, st.floats(0, 1))
def test_reached_is_the_first_round_at_or_above(values, goal):
    expected = None
    for i, value in enumerate(values):
        if value is not None and value >= goal and expected is None:
            expected = i
    found = reached(rows(values), goal)
    assert (found["round"] if found else None) == expected


@given(st.lists(accuracies, min_size=1, max_size=4))
def test_every_run_reached_the_common_accuracy_and_one_no_more(runs):
    common = common_accuracy([rows(run) for run in runs])
    known = [[value for value in run if value is not None] for run in runs]
    if not all(known):
        assert common is None
    else:
        assert all(reached(rows(run), common) for run in runs)
        assert any(max(run) == common for run in known)


def test_differing_names_dotted_keys_with_the_value_of_each_run():
    one = {"seed": 0, "train": {"lr": 0.1, "batch-size": 8}}
    two = {"seed": 0, "train": {"lr": 0.2, "batch-size": 8}, "new": 1}
    assert differing([one, two]) == {"train.lr": [0.1, 0.2], "new": [None, 1]}
    assert differing([one, one]) == {}


def test_runs_are_called_by_strategy_and_by_id_where_that_is_not_enough(finished_run):
    folders = [
        finished_run("7081524913348765001", strategy="fedavg"),
        finished_run("7081524913348765002", strategy="fedavg"),
        finished_run("3", strategy="hfldd"),
    ]
    assert labels([read_run(f) for f in folders]) == ["fedavg …65001", "fedavg …65002", "hfldd"]


def test_tables_tell_results_cost_of_equal_accuracy_and_settings(finished_run):
    runs = [
        read_run(finished_run("1", accuracies=(0.1, 0.6, 0.9), strategy="fedavg")),
        read_run(finished_run("2", accuracies=(0.1, 0.7), strategy="hfldd")),
    ]
    (_, results), (title, cost), (_, settings) = comparison_tables(runs)
    assert [row[:3] for row in results.rows] == [
        ["fedavg", "90.0 %", "90.0 %"],
        ["hfldd", "70.0 %", "70.0 %"],
    ]
    assert "70.0 %" in title
    assert [row[:2] for row in cost.rows] == [["fedavg", "2"], ["hfldd", "1"]]
    assert settings.rows == [["strategy", "fedavg", "hfldd"], ["num-rounds", "2", "1"]]
    (runs[0].folder / "report.html").unlink()
    page = comparison_page(runs, runs[0].folder.parent)
    assert f'href="{runs[1].folder.name}/report.html"' in page
    assert f'href="{runs[0].folder.name}/report.html"' not in page
    assert page.count("<polyline") == 3 * 2


@given(st.lists(st.integers(0, 40), min_size=1))
def test_spans_name_exactly_these_numbers(numbers):
    named = []
    for part in spans(numbers).split(", "):
        first, _, last = part.partition("–")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(set(numbers))


@pytest.mark.parametrize(
    ("num_bytes", "said"),
    [(0, "0 B"), (999, "999 B"), (29_760, "29.8 kB"), (10_905_784, "10.9 MB"), (1e9, "1 GB")],
)
def test_sizes_have_a_unit_that_suits(num_bytes, said):
    assert data_size(num_bytes) == said


@given(st.integers(0, 10**14))
def test_sizes_are_right_to_three_digits_and_never_a_power_of_ten(num_bytes):
    number, unit = data_size(num_bytes).split()
    assert "e" not in number
    factor = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[unit]
    assert float(number) * factor == pytest.approx(num_bytes, rel=0.0051)


def test_ranges_and_seconds_read_as_a_person_writes_them():
    assert between([4, 2, 3]) == "2 to 4"
    assert between([2, 2]) == "2"
    assert [seconds(s) for s in (None, 0.04, 99.94, 246.4)] == ["-", "0.0", "99.9", "246"]
