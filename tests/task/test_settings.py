"""Run-config keys: read, checked, refused with the remedy; and the presets."""

import re
import tomllib
from pathlib import Path

import pytest

from flwr_distill.flower.own_app import PRESETS
from flwr_distill.protocol.registry import built_in_methods
from flwr_distill.server.settings import RunSettings, composed_settings
from flwr_distill.strategies.common.registry import find_strategy
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.settings import TaskSettings
from tests.errors import at

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def flat(table, prefix=""):
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def declared():
    return dict(flat(tomllib.loads(PYPROJECT.read_text())["tool"]["flwr"]["app"]["config"]))


def test_pyproject_declares_every_key_with_the_default_that_the_code_has():
    defaults = composed_settings(built_in_methods())().model_dump(by_alias=True)
    assert declared() == dict(flat(defaults)), "run `make settings`"


def test_both_sides_read_the_same_task_from_a_run_config():
    run_config = declared() | {"train.lr": 1, "partition.scheme": "iid", "seed": 5}
    server, node = RunSettings.from_run_config(run_config), TaskSettings.from_run_config(run_config)
    assert (node.train, node.partition, node.seed) == (server.train, server.partition, server.seed)
    assert node.train.lr == 1.0
    assert node.partition.scheme == "iid"


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("train.lr", -1, "greater than 0"),
        ("train.lr", "fast", "valid number"),
        ("train.lr", float("nan"), "finite"),
        ("num-rounds", 0, "evaluate.model"),
        ("num-rounds", -1, "greater than or equal to 0"),
        ("num-rounds", True, "valid integer"),
        ("num-rounds", 1.5, "valid integer"),
        ("partition.scheme", "random", "'pathological'"),
        ("partition.alpha", 0.0, "greater than 0"),
        ("private.shape", "2x28x28", "channels (1 or 3)"),
        ("hfldd.distilled-size", 0, "greater than or equal to 1"),
        ("train", 3, "dictionary"),
    ],
)
def test_a_bad_value_is_refused_with_key_value_and_what_is_allowed(key, value, allowed):
    with pytest.raises(SettingsError, match=re.escape(allowed), check=at(key, value=value)):
        RunSettings.from_run_config({key: value})


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("hfldd.group", "did you mean hfldd.groups?"),
        ("lr", "did you mean train.lr?"),
        ("train.mom", "did you mean train.momentum?"),
        ("num-round", "did you mean num-rounds?"),
        ("zzz", "see flwr-distill settings"),
    ],
)
def test_an_unknown_key_leads_to_the_nearest_or_to_the_list_of_all(key, remedy):
    with pytest.raises(SettingsError, check=at(key, remedy=remedy)):
        RunSettings.from_run_config({key: 3})


def test_a_misspelt_table_leads_to_the_right_one():
    with pytest.raises(SettingsError, match=r"did you mean train\.lr\?", check=at("trian.lr")):
        RunSettings.from_run_config({"trian.lr": 3})


def test_all_problems_are_named_at_once():
    with pytest.raises(SettingsError) as caught:
        RunSettings.from_run_config({"num-rounds": 0, "train.batch-size": 0})
    assert "num-rounds" in str(caught.value)
    assert "train.batch-size" in str(caught.value)


def test_a_key_below_a_plain_setting_is_refused():
    with pytest.raises(SettingsError, check=at("dataset.size", source="run config")):
        RunSettings.from_run_config({"dataset": "digits", "dataset.size": 3})


PRESET_FILES = sorted(PRESETS.glob("*.toml"))


@pytest.mark.parametrize("path", PRESET_FILES, ids=lambda path: path.stem)
def test_a_preset_is_a_valid_run_config_of_declared_keys(path):
    preset = dict(flat(tomllib.loads(path.read_text())))
    settings = RunSettings.from_run_config(preset)
    assert find_strategy(settings.strategy)
    named = "" if settings.dataset == "private" else settings.dataset
    assert path.stem.startswith(f"{settings.strategy}-{named}")


@pytest.mark.parametrize(("data", "pool"), [("mnist", 50000), ("cifar10", 50000), ("cinic10", 0)])
def test_hfldd_presets_hold_the_papers_numbers(data, pool):
    preset = tomllib.loads((PRESETS / f"hfldd-{data}.toml").read_text())
    settings = RunSettings.from_run_config(dict(flat(preset)))
    own, part = settings.hfldd, settings.partition
    assert (settings.min_nodes, settings.num_rounds, own.groups) == (100, 300, 10)
    assert (part.scheme, part.test_share, part.max_samples) == ("label-quantity", 0.2, pool)
    assert (own.distiller, own.distilled_size, own.distill_steps) == ("kip", 400, 3000)
    assert (own.kip_lr, own.kip_batch_size, own.kip_lambda, own.bits) == (0.004, 10, 1e-6, 8)
    assert (settings.train.lr, settings.train.batch_size) == (0.01, 32)
    added = (own.rotate, own.complete_clusters, own.balanced)
    averages = (own.average_last, own.average_rounds)
    assert not any((*added, *averages))
    assert settings.norm_threshold == settings.most_samples == settings.train.holdout == 0
