"""The catalogue of settings, and what is made of it."""

import tomllib
from typing import Annotated, Literal

import pytest
from pydantic import Field

from flwr_distill.protocol.method import Method
from flwr_distill.protocol.registry import built_in_methods
from flwr_distill.server.settings import composed_settings
from flwr_distill.server.settings_catalogue import (
    PAGE,
    PYPROJECT,
    declared_in,
    page,
    preset,
    settings_tables,
    with_plugins,
)
from flwr_distill.task.settings import Block, nested

TABLES = {table.name: table for table in settings_tables(built_in_methods())}
SETTINGS = {setting.key: setting for table in TABLES.values() for setting in table.settings}
REMEDY = "the settings have changed: run `make settings`"


class Basics(Block):
    """What methods of Acme share."""

    mu: Annotated[float, Field(ge=0, lt=0.5)] = 0.25
    """Weight of ``it``; see :func:`acme.it`. 0 is none."""


class Settings(Basics):
    """Settings of Acme | Co.

    They are many.
    """

    how_far: Literal["near", "far"] = "near"
    """``near`` or ``far``."""
    steps: Annotated[int | None, Field(ge=1)] = None
    name: Annotated[str, Field(min_length=1)] = 'a "b"'


PLUGIN = """
from flwr_distill.protocol.method import Method
from flwr_distill.task.settings import Block

class Settings(Block):
    mu: float = 0.25
    steps: int | None = None

METHOD = Method("acme", "far:Far", settings=Settings)
"""


def of_acme(**about):
    method = Method("acme_far", "acme:Far", settings=Settings, **about)
    return settings_tables({"acme_far": method})[-1]


def test_the_run_config_that_the_app_declares_is_current():
    text = PYPROJECT.read_text(encoding="utf-8")
    assert text == declared_in(text), REMEDY


def test_the_page_of_settings_is_current():
    assert PAGE.read_text(encoding="utf-8") == page(), REMEDY


@pytest.mark.parametrize("key", SETTINGS)
def test_every_setting_says_what_it_is(key):
    remedy = "describe it by a string below the field"
    assert SETTINGS[key].meaning.endswith("."), f"{key}: {remedy}"


def test_core_keys_come_first_and_tables_of_all_runs_before_those_of_methods():
    ours = [
        "core",
        "backbone",
        "evaluate",
        "partition",
        "private",
        "simulation",
        "train",
        "virtual",
    ]
    assert list(TABLES)[: len(ours)] == ours
    of_methods = {name for name, table in TABLES.items() if table.methods}
    assert of_methods == set(list(TABLES)[len(ours) :])
    assert {"hfldd", "fedhead", "moon", "feddyn", "fedfa"} < set(TABLES)


def test_a_table_that_methods_share_names_them_all():
    names = {method.name for method in TABLES["fedhead"].methods}
    assert names == {"fedhead", "fedhead-plus", "feddf"}


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("download", "true or false"),
        ("num-rounds", "whole number: at least 0"),
        ("train.dp-delta", "number: above 0, below 1"),
        ("fraction-train", "number: above 0, at most 1"),
        ("seed", "whole number: at least 0, below 2147483648"),
        ("runs-dir", "text: not empty"),
        ("links", "text: `relay`, `direct`, `auto`"),
        ("private.shape", "text"),
        ("resume", "text"),
    ],
)
def test_types_and_bounds_are_told_in_plain_words(key, values):
    assert SETTINGS[key].values == values


def test_a_field_is_described_by_the_string_below_it_in_its_class_or_one_that_it_extends():
    meanings = {setting.key: setting.meaning for setting in of_acme().settings}
    assert meanings == {
        "acme-far.mu": "Weight of `it`; see `acme.it`. 0 is none.",
        "acme-far.how-far": "`near` or `far`.",
        "acme-far.steps": "",
        "acme-far.name": "",
    }


def test_a_method_of_another_package_has_its_table_but_the_app_does_not_declare_it():
    table = of_acme(package="acme==1.0")
    assert (table.name, table.meaning) == ("acme-far", "Settings of Acme | Co.")
    assert [method.name for method in table.methods] == ["acme_far"]
    assert table.settings[2].type == "whole number or nothing"
    assert not table.declared
    assert all(table.declared for table in TABLES.values())


def test_a_preset_of_everything_is_a_run_config_at_its_defaults():
    text = preset(TABLES.values())
    settings = composed_settings(built_in_methods())
    assert settings.model_validate(tomllib.loads(text)).model_dump() == settings().model_dump()
    about = "# Rounds, T in the papers; 0 with `evaluate.model` or `statistics`."
    assert f"{about} (whole number: at least 0)\nnum-rounds = 10\n" in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_preset_of_another_packages_method_gives_its_settings_in_their_table():
    written = tomllib.loads(preset([of_acme(package="acme==1.0")], "acme_far"))
    assert written.pop("strategy") == "acme_far"
    method = Method("acme_far", "acme:Far", settings=Settings)
    settings = composed_settings({"acme_far": method}).checked(written, "run config")
    assert settings.of_method(method) == Settings()


def test_the_page_of_the_baselines_settings_is_current():
    file = PAGE.parents[1] / "baselines" / "settings.md"
    assert file.read_text(encoding="utf-8") == page("flwr-distill-baselines"), REMEDY


def test_settings_of_an_installed_package_are_declared_where_a_run_names_them(install):
    install("far", PLUGIN, name="acme", acme="far:METHOD")
    text = PYPROJECT.read_text(encoding="utf-8")

    def declared(run_config):
        app = tomllib.loads(with_plugins(text, run_config))["tool"]["flwr"]["app"]
        return app["config"].get("acme")

    assert declared({}) is None
    assert declared({"strategy": "acme", "train.lr": 1.0}) is None
    assert declared({"acme.mu": 2.0}) == {"mu": 0.25}
    assert declared({"acme.steps": 3}) == {"mu": 0.25, "steps": 3}


def test_only_the_run_config_is_rewritten():
    around = '[project]\nname = "a"\n\n{}[tool.other]\nb = 1\n'
    text = around.format("[tool.flwr.app.config]\nold = 1\n\n[tool.flwr.app.config.old]\nc = 2\n")
    rewritten = declared_in(text)
    assert declared_in(rewritten) == rewritten
    parsed = tomllib.loads(rewritten)
    assert parsed["project"] == {"name": "a"}
    assert parsed["tool"]["other"] == {"b": 1}
    expected = nested({key: setting.default for key, setting in SETTINGS.items()})
    assert parsed["tool"]["flwr"]["app"]["config"] == expected
