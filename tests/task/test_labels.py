"""The label map: names in an order that is the same everywhere, told apart, and compared."""

import pytest

from flwr_distill.task.datasets import DatasetError, DataSpec
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.labels import LabelError, LabelMap, in_order
from flwr_distill.task.settings import (
    TaskSettings,
)
from flwr_distill.task.source import data_spec


def test_numbers_are_ordered_by_value_and_come_before_texts():
    names = ["10", "9", "b", "1.5", "-2", "a", "9", "08", "٣"]
    assert in_order(names) == ("-2", "1.5", "08", "9", "10", "a", "b", "٣")


@pytest.mark.parametrize(
    "names", [("1", "01"), ("1.0", "1"), ("a", "a"), ("",), ("a\nb",), ("\u202eab",), ("x" * 61,)]
)
def test_names_that_cannot_be_told_apart_or_shown_are_refused(names):
    with pytest.raises(LabelError):
        LabelMap(names)
    with pytest.raises(LabelError):
        LabelMap(columns=names)


def test_more_names_than_a_run_can_have_are_refused():
    LabelMap(tuple(map(str, range(10_000))))
    with pytest.raises(LabelError):
        LabelMap(tuple(map(str, range(10_001))))


def test_the_hash_is_of_all_names_and_their_order():
    maps = [
        LabelMap(("a", "b")),
        LabelMap(("b", "a")),
        LabelMap(("a", "b"), ("c",)),
        LabelMap((), ("a", "b")),
        LabelMap(),
    ]
    assert len({labels.digest for labels in maps}) == len(maps)
    assert LabelMap(("a", "b")).digest == maps[0].digest


def test_a_difference_shows_both_versions_and_what_is_missing_or_extra():
    run, own = LabelMap(("a", "b"), ("x", "y")), LabelMap(("a", "c"), ("x", "y"))
    text = own.difference(run)
    assert all(part in text for part in ("missing b", "extra c", "a and c", "a and b"))
    assert "columns" not in text
    assert run.difference(run) == ""
    assert "no names" in LabelMap().difference(run)
    assert LabelMap(("b", "a"), ("x", "y")).difference(run)


def test_many_names_make_a_short_text():
    run = LabelMap(columns=tuple(f"c{i}" for i in range(9_000)))
    own = LabelMap(columns=tuple(f"d{i}" for i in range(9_000)))
    assert len(own.difference(run)) < 300


def test_a_spec_has_a_name_for_each_class_or_none():
    assert DataSpec("x", (1, 2, 2), 3, (0.5,), (0.5,)).class_names == ("0", "1", "2")
    with pytest.raises(DatasetError):
        DataSpec("x", (1, 2, 2), 3, (0.5,), (0.5,), labels=LabelMap(("a", "b")))
    with pytest.raises(DatasetError):
        DataSpec("x", (1, 1, 1), 2, (0.5,), (0.5,), labels=LabelMap(columns=("a", "b")))


@pytest.mark.parametrize("names", ["1,01", "a", "a,,b", "a,a", "a,b\tc"])
def test_the_setting_takes_only_names_that_can_be_told_apart(names):
    with pytest.raises(SettingsError, match=r"private\.classes"):
        TaskSettings.from_run_config({"private.classes": names})


def test_the_names_of_the_setting_are_the_runs_label_map_in_their_order():
    settings = TaskSettings.from_run_config({"dataset": "private", "private.classes": "3,1,2"})
    assert data_spec(settings).labels == LabelMap(("3", "1", "2"))
