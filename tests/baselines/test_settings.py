"""Settings of installed methods are keys of the run config, as those of built-in ones are."""

import tomllib
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from flwr_distill.flower.bundle import app_bundle
from flwr_distill.flower.own_app import APP_DIR
from flwr_distill.protocol.registry import built_in_methods, find_method
from flwr_distill.server.settings import RunSettings, composed_settings
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.settings import nested
from tests.errors import at

ROOT = Path(__file__).resolve().parents[2]


def declared_by_bundle(app_dir, run_config):
    with zipfile.ZipFile(BytesIO(app_bundle(app_dir, run_config))) as archive:
        settings = tomllib.loads(archive.read("pyproject.toml").decode())
    return settings["tool"]["flwr"]["app"].get("config", {})


def test_a_run_sets_them_by_their_keys():
    settings = RunSettings.from_run_config({"strategy": "fedproto", "fedproto.weight": 2.0})
    assert settings.of_method(find_method("fedproto")).weight == 2.0
    with pytest.raises(SettingsError, check=at("fedproto.weight", value=-1.0)):
        RunSettings.from_run_config({"fedproto.weight": -1.0})


def test_without_the_package_its_keys_are_an_error_that_names_what_is_missing():
    of_ours = composed_settings(built_in_methods())
    with pytest.raises(SettingsError, check=at("fedproto.weight")):
        of_ours.checked(nested({"fedproto.weight": 2.0}), "run config")


@pytest.mark.parametrize("app_dir", [APP_DIR, ROOT], ids=["packaged", "checkout"])
def test_the_bundle_declares_those_that_the_run_names_and_no_others(app_dir):
    declared = declared_by_bundle(app_dir, {"fedproto.weight": 2.0, "num-rounds": 3})
    assert declared["fedproto"] == {"weight": 1.0}
    assert "vhl" not in declared
    assert "hfldd" in declared


def test_the_bundle_of_a_run_that_names_none_is_the_same_with_and_without_the_package():
    assert app_bundle(APP_DIR, {"strategy": "fedproto", "train.lr": 0.1}) == app_bundle(APP_DIR)


def test_the_bundle_of_anothers_app_declares_nothing_of_them():
    app = ROOT / "examples" / "own-app"
    assert "fedproto" not in declared_by_bundle(app, {"fedproto.weight": 2.0})
