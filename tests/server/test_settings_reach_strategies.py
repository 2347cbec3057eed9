"""Settings that once slipped through: refused before nodes are asked, or obeyed on nodes."""

import json
import logging

import pytest
from flwr.app import Context, RecordDict

from flwr_distill.links.records import Introduction
from flwr_distill.links.routes import Links
from flwr_distill.server.app import main
from flwr_distill.strategies.fedhead.exchange import Exchange
from flwr_distill.task.errors import SettingsError


@pytest.fixture
def run(client_grid, tmp_path):
    """Run our ServerApp on two nodes in this process; returns the grid and the rows of the run."""

    def start(num_rounds=1, **settings):
        config = {key.replace("__", ".").replace("_", "-"): v for key, v in settings.items()}
        config |= {"num-rounds": num_rounds, "min-nodes": 2, "runs-dir": str(tmp_path)}
        start.grid = client_grid(2, config)
        main(start.grid, Context(7, 1, {}, RecordDict(), config))
        return [json.loads(line) for line in (tmp_path / "7" / "metrics.jsonl").open()]

    return start


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"strategy": "fednova", "train__momentum": 0.9}, "train.momentum = 0.9: FedNova"),
        ({"strategy": "fednova", "train__optimizer": "adam"}, "train.optimizer = 'adam'"),
        ({"hfldd__distiller": "kpi"}, "hfldd.distiller = 'kpi'"),
        ({"hfldd__start": "somewhere"}, "hfldd.start = 'somewhere'"),
        ({"hfldd__votes": True}, "hfldd.rotate = True: must be false for hfldd.votes"),
        (
            {"hfldd__votes": True, "hfldd__rotate": False},
            "hfldd.complete-clusters = True: must be false for hfldd.votes",
        ),
    ],
)
def test_what_a_method_cannot_do_is_refused_before_any_node_is_asked(run, settings, said):
    with pytest.raises(SettingsError, match=said):
        run(**settings)
    assert run.grid.pushed == []


def test_fedlgd_trains_with_a_relational_term_too(run):
    steps = {f"fedlgd__{name}_steps": 2 for name in ("first", "refine", "global")}
    rows = run(2, strategy="fedlgd", train__kd_lambda=0.5, fedlgd__every=1, **steps)
    assert [row["server_bytes"] > 0 for row in rows[1:]] == [True, True]
    assert rows[1]["loss"] != rows[0]["loss"]


def test_a_node_says_which_distiller_auto_takes_and_why(run, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    caplog.set_level(logging.INFO, "flwr")
    run(hfldd__groups=2, hfldd__distill_steps=2, hfldd__distilled_size=4)
    assert any("istiller auto takes dm" in message for message in caplog.messages)


def test_fedhead_plus_says_what_distilling_on_noise_costs(run, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    few = {f"fedhead__{name}": 1 for name in ("distill_epochs", "server_epochs")}
    run(strategy="fedhead-plus", fedhead__reference_size=8, **few)
    assert "fedhead-plus distils on images of noise" in caplog.text


def test_a_late_node_without_an_address_is_left_out_and_ends_the_run_only_in_round_one():
    links = Links({1: Introduction(public_key=bytes(32)), 2: Introduction(public_key=bytes(32))})
    links.mode = "direct"
    exchange = Exchange(None, None, links, {}, 1.0, strict=True)
    with pytest.raises(SettingsError, match="has no address"):
        exchange.routes_to(2, [1])
    exchange.strict = False
    assert exchange.routes_to(2, [1]) == {}


def test_members_send_small_images_and_heads_take_them(run, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    caplog.set_level(logging.INFO, "flwr")
    little = {"groups": 2, "distill_steps": 1, "distilled_size": 4, "formation": 2}
    (*_, row) = run(**{f"hfldd__{key}": value for key, value in little.items()})
    told = [m.content.config_records.get("config", {}) for m in run.grid.pushed]
    assert {config["formation"] for config in told if "formation" in config} == {2}
    assert any("has virtual data of 1 member" in message for message in caplog.messages)
    assert row["link_bytes"] > 0
