"""The label map: names in an order that is the same everywhere, told apart, and compared."""

import pytest

from flwr_distill.task.datasets import DatasetError, DataSpec
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.labels import LabelError, LabelMap, in_order
from flwr_distill.task.settings import TaskSettings
from flwr_distill.task.source import data_spec
from tests.errors import at


def test_numbers_are_ordered_by_value_and_come_before_texts():
    names = ["10", "9", "b", "1.5", "-2", "a", "9", "08", "٣"]
    assert in_order(names) == ("-2", "1.5", "08", "9", "10", "a", "b", "٣")


@pytest.mark.parametrize(
    "names",
    [
        *(("1", "01"), ("1.0", "1"), ("a", "a"), ("",), ("a\nb",), ("\u202eab",), ("x" * 61,)),
        tuple(map(str, range(10_001))),
    ],
    ids=lambda names: ascii(names)[:20],
)
def test_ambiguous_unprintable_or_too_many_names_are_an_error(names):
    LabelMap(names[:10_000] if len(names) > 2 else ())
    with pytest.raises(LabelError, check=at("classes")):
        LabelMap(names)
    with pytest.raises(LabelError, check=at("columns")):
        LabelMap(columns=names)


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
    many = [LabelMap(columns=tuple(f"{x}{i}" for i in range(9_000))) for x in "cd"]
    assert len(many[0].difference(many[1])) < 300


def test_a_spec_has_a_name_for_each_class_or_none():
    assert DataSpec("x", (1, 2, 2), 3, (0.5,), (0.5,)).class_names == ("0", "1", "2")
    with pytest.raises(DatasetError):
        DataSpec("x", (1, 2, 2), 3, (0.5,), (0.5,), labels=LabelMap(("a", "b")))
    with pytest.raises(DatasetError):
        DataSpec("x", (1, 1, 1), 2, (0.5,), (0.5,), labels=LabelMap(columns=("a", "b")))


@pytest.mark.parametrize("names", ["1,01", "a", "a,,b", "a,a", "a,b\tc"])
def test_the_setting_takes_only_names_of_a_label_map(names):
    with pytest.raises(SettingsError, check=at("private.classes", value=names)):
        TaskSettings.from_run_config({"private.classes": names})


def test_the_names_of_the_setting_are_the_runs_label_map_in_their_order():
    settings = TaskSettings.from_run_config({"dataset": "private", "private.classes": "3,1,2"})
    assert data_spec(settings).labels == LabelMap(("3", "1", "2"))
