"""The papers' settings as run-config files."""

import tomllib

import pytest

from flwr_distill.flower.own_app import PRESETS
from flwr_distill.server.settings import RunSettings
from flwr_distill.strategies.common.registry import find_strategy

PRESET_FILES = sorted(PRESETS.glob("*.toml"))


def flat(table, prefix=""):
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


@pytest.mark.parametrize("path", PRESET_FILES, ids=lambda path: path.stem)
def test_a_preset_is_a_valid_run_config_of_declared_keys(path):
    preset = dict(flat(tomllib.loads(path.read_text())))
    settings = RunSettings.from_run_config(preset)
    assert find_strategy(settings.strategy)
    assert path.stem.startswith(f"{settings.strategy}-{settings.dataset}")


def test_hfldd_presets_hold_the_papers_numbers():
    for classes in (1, 2, 10):
        path = PRESETS / f"hfldd-mnist-c{classes}.toml"
        settings = RunSettings.from_run_config(dict(flat(tomllib.loads(path.read_text()))))
        assert (settings.min_nodes, settings.num_rounds, settings.hfldd.groups) == (100, 300, 10)
        assert settings.partition.classes == classes
        assert (settings.hfldd.distiller, settings.hfldd.distilled_size) == ("kip", 400)
        assert (settings.train.lr, settings.train.batch_size) == (0.01, 32)
