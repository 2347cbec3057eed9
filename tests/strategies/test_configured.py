"""A setting is written once, and its strategy keeps it."""

import inspect
import tomllib
from typing import Annotated

import pytest
from flwr.app import ArrayRecord, ConfigRecord
from pydantic import Field

from flwr_distill.protocol.method import Method
from flwr_distill.server.settings import composed_settings
from flwr_distill.server.settings_catalogue import settings_tables, to_toml
from flwr_distill.strategies.common.checked import CheckedFedAvg
from flwr_distill.strategies.common.registry import create_strategy, find_strategy
from flwr_distill.strategies.hfldd import HFLDD
from flwr_distill.strategies.hfldd.method import HFLDDSettings
from flwr_distill.strategies.moon.method import MOONSettings
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.settings import (
    Block,
    nested,
)

OTHER_THAN_DEFAULT = {
    "hfldd": {"groups": 3},
    "fedhead": {"distill_lr": 0.01},
    "fedhead-plus": {"server_epochs": 2},
    "feddf": {"average": "logits"},
    "cadis": {"rule": "agreement"},
    "fedlgd": {"every": 2},
    "analytic": {"head": "lda"},
    "feddm": {"radius": 1.0},
    "feddyn": {"alpha": 0.1},
    "fedfa": {"server_lr": 0.0},
    "moon": {"mu": 5.0},
    "dynafed": {"tune_steps": 3},
    "fedaf": {"gamma": 0.5},
    "fedhkd": {"noise": 1.0},
    "fedmd": {"digest_epochs": 2},
    "fedproto": {"weight": 0.1},
    "fedseq": {"cluster_size": 5},
    "fedseq-zaccone": {"most_nodes": 5},
    "vhl": {"contrast": 0.2},
}
"""A setting of each method."""


class FallSettings(Block):
    by: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Factor of the learning rate from round to round."""


class Fall(CheckedFedAvg):
    settings: FallSettings = FallSettings()

    def records(self):
        return {"fall": ConfigRecord({"by": self.settings.by})}


METHODS = {"fall": Method("fall", f"{__name__}:Fall", settings=FallSettings)}


def sent(strategy, grid):
    (message, *_) = strategy.configure_train(1, ArrayRecord({}), ConfigRecord(), grid)
    return message.content["fall"]["by"]


def test_a_setting_is_a_field_and_its_use_and_nothing_else(a_run, client_grid):
    """It is then in the catalogue, in the run config and in the strategy."""
    (setting,) = settings_tables(METHODS)[-1].settings
    assert (setting.key, setting.default) == ("fall.by", 0.9)
    assert setting.bounds == "above 0, at most 1"
    assert setting.meaning == "Factor of the learning rate from round to round."
    assert tomllib.loads(to_toml(settings_tables(METHODS)))["fall"] == {"by": 0.9}
    run_config = composed_settings(METHODS).checked(nested({"fall.by": 0.5}), "run config")
    grid = client_grid(2, {})
    assert sent(create_strategy(Fall, run_config.fall, a_run(), {}), grid) == 0.5
    assert sent(Fall(by=0.25), grid) == 0.25
    assert sent(Fall(), grid) == 0.9


def test_settings_are_an_object_or_fields_by_keyword_which_take_precedence():
    settings = HFLDDSettings(groups=10, rotate=False)
    assert HFLDD(settings=settings).settings is settings
    assert HFLDD(groups=10, rotate=False).settings == settings
    assert HFLDD(settings=settings, groups=3).settings == HFLDDSettings(groups=3, rotate=False)


@pytest.mark.parametrize(("name", "other"), OTHER_THAN_DEFAULT.items())
def test_a_strategy_keeps_the_settings_of_its_run(a_run, name, other):
    strategy, method = find_strategy(name)
    settings = method.settings(**other)
    assert create_strategy(strategy, settings, a_run(), {}).settings == settings


@pytest.mark.parametrize("name", OTHER_THAN_DEFAULT)
def test_no_constructor_repeats_a_setting(name):
    strategy, method = find_strategy(name)
    repeated = {
        parameter
        for base in strategy.__mro__
        if base.__module__.startswith("flwr_distill") and "__init__" in vars(base)
        for parameter in inspect.signature(base.__init__).parameters
    } & method.settings.model_fields.keys()
    assert repeated == set()


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"groups": -1}, SettingsError, "groups = -1"),
        ({"groups": "many"}, SettingsError, "groups = 'many'"),
        ({"refresh_every": 5, "share_raw_data": True}, SettingsError, "refresh-every = 5"),
        ({"refresh_every": 5, "heads": "all"}, SettingsError, "refresh-every = 5"),
        ({"votes": True, "heads": "all"}, SettingsError, "votes = True"),
        ({"gruops": 10}, TypeError, "gruops"),
        ({"settings": MOONSettings()}, TypeError, "MOONSettings"),
    ],
)
def test_a_wrong_argument_in_anyones_serverapp_is_named(arguments, error, named):
    with pytest.raises(error, match=named):
        HFLDD(**arguments)
