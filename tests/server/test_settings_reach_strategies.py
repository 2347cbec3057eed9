"""Settings that once slipped through: refused before nodes are asked, or obeyed on nodes."""

import logging
from functools import partial

import pytest

from flwr_distill.links.records import Introduction
from flwr_distill.links.routes import Links
from flwr_distill.server.settings import RunSettings
from flwr_distill.strategies.fedhead.exchange import Exchange
from flwr_distill.task.errors import SettingsError
from tests.server.run_folder import rows


@pytest.fixture
def run(play):
    return partial(play, {"strategy": "hfldd", "num-rounds": 1}, nodes=2)


@pytest.mark.parametrize(
    ("settings", "unread"),
    [
        ({"strategy": "fedavg", "fedlgd__every": 1}, "fedlgd.every"),
        ({"strategy": "fedavg", "fedlgd__every": RunSettings.from_run_config({}).fedlgd.every}, ""),
        ({"strategy": "feddf", "fedhead__patience": 1, "fedhead__reference_size": 20}, ""),
    ],
)
def test_a_warning_names_settings_of_methods_that_do_not_run(run, caplog, settings, unread):
    caplog.set_level(logging.WARNING, "flwr")
    run(**settings)
    assert ("does not read" in caplog.text) == bool(unread)
    assert unread in caplog.text


def test_fedlgd_trains_with_a_relational_term_too(run):
    steps = {f"fedlgd__{name}_steps": 2 for name in ("first", "refine", "global")}
    settings = {"strategy": "fedlgd", "train__kd_lambda": 0.5, "fedlgd__every": 1, **steps}
    found = rows(run(num_rounds=2, **settings))
    assert [row["server_bytes"] > 0 for row in found[1:]] == [True, True]
    assert found[1]["loss"] != found[0]["loss"]


def test_a_node_says_which_distiller_auto_takes_and_why(run, flower_log):
    flower_log.set_level(logging.INFO)
    run(hfldd__groups=2, hfldd__distill_steps=2, hfldd__distilled_size=4)
    assert any("istiller auto takes dm" in message for message in flower_log.messages)


def test_fedhead_plus_says_what_distilling_on_noise_costs(run, flower_log):
    few = {f"fedhead__{name}": 1 for name in ("distill_epochs", "server_epochs")}
    run(strategy="fedhead-plus", fedhead__reference_size=8, **few)
    assert "fedhead-plus distils on images of noise" in flower_log.text


def test_a_late_node_without_an_address_is_left_out_and_ends_the_run_only_in_round_one():
    links = Links({1: Introduction(public_key=bytes(32)), 2: Introduction(public_key=bytes(32))})
    links.mode = "direct"
    exchange = Exchange(None, None, links, {}, 1.0, strict=True)
    with pytest.raises(SettingsError, match="has no address"):
        exchange.routes_to(2, [1])
    exchange.strict = False
    assert exchange.routes_to(2, [1]) == {}


def test_members_send_small_images_and_heads_take_them(run, play, flower_log):
    flower_log.set_level(logging.INFO)
    little = {"groups": 2, "distill_steps": 1, "distilled_size": 4, "formation": 2}
    (*_, row) = rows(run(**{f"hfldd__{key}": value for key, value in little.items()}))
    told = [m.content.config_records.get("config", {}) for m in play.grid.pushed]
    assert {config["formation"] for config in told if "formation" in config} == {2}
    assert any("has virtual data of 1 member" in message for message in flower_log.messages)
    assert row["link_bytes"] > 0
