"""Whatever a run config or a message holds, the settings parser gives settings or their error."""

from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flwr_distill.links.records import Delivery, Introduction, Parcel, Route
from flwr_distill.server.page.run_files import flat
from flwr_distill.server.settings import RunSettings, default_settings
from flwr_distill.strategies.common.ensemble import EnsembleDistillation
from flwr_distill.strategies.fedlgd.method import GlobalData, VirtualTraining
from flwr_distill.strategies.hfldd.requests import Distillation
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.settings import (
    TaskSettings,
    TrainSettings,
)

from .conftest import FUZZ

KEYS = sorted(flat(default_settings()))
VALUES = (
    st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["12:5:3", "3x8x8", "dirichlet", "auto", "0.5", "1e400"])
)
LIKELY_KEYS = (
    st.sampled_from(KEYS)
    | st.text()
    | st.builds(".".join, st.lists(st.sampled_from(["train", "lr", "", "-", "seed"]), max_size=4))
)
BLOCKS = [
    TrainSettings,
    Distillation,
    EnsembleDistillation,
    GlobalData,
    VirtualTraining,
    Introduction,
    Route,
    Parcel,
    Delivery,
]


@FUZZ
@example({}, RunSettings)
@example({"seed": 3, "train.lr": 1, "hfldd.start": "noise"}, RunSettings)
@example({"seed": 3, "train.lr": 1, "hfldd.start": "noise"}, TaskSettings)
@given(
    st.dictionaries(LIKELY_KEYS, VALUES, max_size=6), st.sampled_from([RunSettings, TaskSettings])
)
def test_a_run_config_is_read_or_refused(run_config, kind):
    try:
        settings = kind.from_run_config(run_config)
    except SettingsError:
        assert run_config
    else:
        assert isinstance(settings, kind)
        assert type(settings).model_validate(settings.model_dump()) == settings
        flattened = flat(settings.model_dump(by_alias=True))
        assert all(flattened[key] == value for key, value in run_config.items() if key in flattened)


@pytest.mark.parametrize("kind", [RunSettings, TaskSettings])
@pytest.mark.parametrize("value", ["3", 1.5, True, -1, 2**31])
def test_a_value_that_no_seed_can_have_is_refused(kind, value):
    with pytest.raises(SettingsError, match="seed"):
        kind.from_run_config({"seed": value})


@FUZZ
@given(st.data(), st.sampled_from(BLOCKS))
def test_a_record_of_a_message_is_read_or_refused(data, kind):
    keys = st.sampled_from([field.alias for field in kind.model_fields.values()]) | st.text()
    values = VALUES | st.binary(max_size=40) | st.lists(st.integers(), max_size=3)
    with suppress(SettingsError):
        kind.checked(data.draw(st.dictionaries(keys, values, max_size=8)), "message")
