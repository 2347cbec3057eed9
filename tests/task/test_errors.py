"""Errors carry where they are, what was found and what to do, and keep it between processes."""

import pickle
from pathlib import Path

import pytest

from flwr_distill.task.errors import MAX_SHOWN, DatasetError, ReportedError, SettingsError
from flwr_distill.task.settings import PartitionSettings


def test_an_error_says_where_it_is_what_was_found_and_what_to_do():
    error = ReportedError("must be > 0", where="partition.alpha", value=-1, remedy="try 0.1")
    assert str(error) == "partition.alpha = -1: must be > 0 (try 0.1)"
    assert str(ReportedError("is empty")) == "is empty"
    assert str(SettingsError("is missing", where="lr", source="a.toml")) == "a.toml: lr: is missing"


def test_a_hostile_value_does_not_flood_the_log():
    assert len(str(DatasetError("is odd", where="x", value="y" * 10**6))) < MAX_SHOWN + 50


def test_an_error_keeps_its_fields_when_a_worker_sends_it():
    error = pickle.loads(pickle.dumps(SettingsError("is odd", where="x", value=1, source="s")))
    assert (error.where, error.value, error.source) == ("x", 1, "s")


def test_a_bad_key_of_a_table_is_named_in_the_error():
    with pytest.raises(SettingsError) as error:
        PartitionSettings.checked({"alpha": -1.0}, "run config")
    assert (error.value.where, error.value.value) == ("alpha", -1.0)
    assert error.value.source == "run config"


def test_a_path_is_shown_as_its_text():
    assert str(SettingsError("is missing", where="data", value=Path("a/b"))).startswith(
        "data = 'a/b':"
    )
