"""Differential privacy at the server: settings that leave a hole, and what the report says."""

import json

import pytest

from flwr_distill.protocol.method import TRAIN_PHASE, Method, all_protected
from flwr_distill.protocol.registry import built_in_methods
from flwr_distill.server.export.card import model_card
from flwr_distill.server.page.privacy import privacy, spent
from flwr_distill.server.page.run_files import read_run
from flwr_distill.server.privacy import check_privacy, check_secure_sums
from flwr_distill.server.settings import RunSettings
from flwr_distill.strategies.common.panels import virtual_data
from flwr_distill.strategies.common.registry import find_strategy
from flwr_distill.task.errors import SettingsError
from tests.errors import at

NOISE = {"train.dp-noise": 1.0}
HFLDD = {"hfldd.dp-epsilon": 10.0, "hfldd.start": "noise", "hfldd.balanced": False}


def check(**settings):
    run = RunSettings.from_run_config(settings)
    check_privacy(run, find_strategy(run.strategy)[1])


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "hfldd"},
        {"strategy": "fedhead"},
        NOISE | {"strategy": "fedavg"},
        NOISE | {"strategy": "flwr.serverapp.strategy:FedAdam"},
        NOISE | {"strategy": "cadis", "cadis.kd-lambda": 0.0},
        NOISE | {"strategy": "hfldd", **HFLDD},
        NOISE | {"strategy": "hfldd", **HFLDD, "hfldd.balanced": True, "hfldd.heads": "all"},
        {"strategy": "hfldd", "hfldd.dp-epsilon": 10.0, "hfldd.start": "noise"},
    ],
)
def test_settings_that_go_together_pass(settings):
    check(**settings)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"strategy": "fedhead"}, "strategy = 'fedhead': leaders distil.*take another strategy"),
        ({"strategy": "fedhead-plus"}, "leaders distil"),
        (
            {"strategy": "flwr_distill.strategies.fedhead.strategy:FedHEAD"},
            "FedHEAD': leaders distil",
        ),
        ({"strategy": "fedlgd"}, "set train.dp-noise to 0, .* fedlgd.dp-epsilon to 1.0"),
        ({"strategy": "fedfa"}, "accuracy"),
        ({"strategy": "cadis"}, r"set cadis.kd-lambda to 0"),
        ({"strategy": "hfldd"}, r"set hfldd.dp-epsilon to 10.0, and hfldd.start"),
        ({"strategy": "hfldd", **HFLDD, "hfldd.balanced": True}, "set hfldd.balanced to false"),
    ],
)
def test_a_hole_is_refused_with_the_remedy(settings, complaint):
    with pytest.raises(SettingsError, match=complaint, check=at("train.dp-noise", value=1.0)):
        check(**NOISE, **settings)


@pytest.mark.parametrize("method", ["hfldd", "fedlgd"])
def test_an_epsilon_of_virtual_images_made_of_virtual_images_is_refused(method):
    run = {"strategy": method, f"{method}.dp-epsilon": 2.0, "train.on": "virtual"}
    own = {"hfldd.start": "noise"} if method == "hfldd" else {"fedlgd.refine-steps": 0}
    with pytest.raises(SettingsError, match=f"{method}.dp-epsilon", check=at("train.on")):
        check(**run, **own)


@pytest.mark.parametrize("brings", [{"phases": (TRAIN_PHASE,)}, {"terms": {"r": "m:Term"}}])
def test_a_method_that_does_not_say_what_is_covered_is_refused(brings):
    settings = RunSettings.from_run_config(NOISE | {"strategy": "mine"})
    with pytest.raises(SettingsError, match="'mine': mine does not declare what"):
        check_privacy(settings, Method("mine", "my.module:Strategy", **brings))
    check_privacy(settings, Method("mine", "my.module:Strategy"))
    check_privacy(settings, Method("mine", "my:Strategy", unprotected=all_protected, **brings))


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        ({"hfldd.distiller": "kip"}, "take dm"),
        ({"hfldd.start": "class-stats"}, "take noise"),
        ({"hfldd.start": "real", "hfldd.allow-real-start": True}, "take noise"),
        ({"hfldd.share-raw-data": True}, "set it to false"),
    ],
)
def test_distillation_that_would_tell_of_real_images_is_refused(setting, remedy):
    with pytest.raises(SettingsError, match=rf"hfldd.dp-epsilon = 10.0: .*{remedy}"):
        check(**(HFLDD | setting))


def run_that_spent(finished_run, entries, **settings):
    folder = finished_run(**{"strategy": "hfldd", **settings})
    with (folder / "journal.jsonl").open("a") as file:
        for entry in entries:
            file.write(json.dumps(entry) + "\n")
    return read_run(folder)


ENTRIES = [
    {"round": 0, "nodes": {"8": {"dp-epsilon": 9.9, "virtual-epsilon": 9.9}}},
    {"round": 1, "nodes": {"7": {"dp-epsilon": 1.25}}},
    {"round": 2, "nodes": {"7": {"dp-epsilon": 2.5}, "9": {"train-loss": 1.0}}},
]


def test_report_and_card_tell_the_largest_epsilon_and_each_node_s(finished_run):
    run = run_that_spent(finished_run, ENTRIES, train__dp_noise=1.5)
    assert sorted(spent(run).values()) == [2.5, 9.9]
    section = privacy(run)
    assert "largest epsilon of 2 nodes is 9.9, at delta = 1e-05" in section.text[0]
    assert "Not covered" in section.text[1]
    assert sorted(row[1] for row in section.tables[0].rows) == ["2.5", "9.9"]
    card = model_card(run, "model.pt")
    assert "epsilon is at most 9.9 at delta = 1e-05 (DP-SGD, noise multiplier 1.5" in card
    assert "2.5" in card
    assert "without differential privacy" not in card


def test_report_and_card_say_that_a_node_as_a_whole_is_not_hidden(finished_run):
    of_all = [{"round": 1, "nodes": {"7": {"dp-epsilon": 2.5, "dp-epsilon-of-all": 41000.0}}}]
    run = run_that_spent(finished_run, ENTRIES + of_all, train__dp_noise=1.5)
    said = "All samples of a node together have an epsilon of 4.1e+04. That bounds"
    assert said in privacy(run).text[1]
    assert said in model_card(run, "model.pt")


def test_private_virtual_data_alone_do_not_make_the_model_private(finished_run):
    run = run_that_spent(finished_run, ENTRIES[:1])
    assert "Only the virtual data were made under differential privacy" in privacy(run).text[1]
    assert "epsilon of at most 9.9" in virtual_data(run).text[-1]
    card = model_card(run, "model.pt")
    assert "Trained without differential privacy" in card
    assert "made under differential privacy with an epsilon of 9.9" in card


PRIVATE_FEDLGD = {
    "strategy": "fedlgd",
    "fedlgd__dp_epsilon": 1.0,
    "fedlgd__refine_steps": 0,
}


def test_a_method_that_trains_on_private_virtual_data_alone_makes_the_model_private(finished_run):
    run = run_that_spent(finished_run, ENTRIES[1:], **PRIVATE_FEDLGD)
    assert "Not covered" in privacy(run).text[1]
    card = model_card(run, "model.pt")
    assert "epsilon is at most 2.5 at delta = 1e-05 (on virtual data from noisy class" in card
    assert "without differential privacy" not in card


@pytest.mark.parametrize("other", [{"fedlgd__dp_epsilon": 0.0}, {"start": "analytic"}])
def test_what_else_nodes_sent_makes_the_model_not_private(finished_run, other):
    run = run_that_spent(finished_run, ENTRIES[1:], **(PRIVATE_FEDLGD | other))
    assert "Only the virtual data" in privacy(run).text[1]
    assert "Trained without differential privacy" in model_card(run, "model.pt")


def test_refining_goes_not_with_fedlgds_differential_privacy():
    with pytest.raises(SettingsError, match=r"fedlgd.dp-epsilon = 1.0: .*set refine-steps to 0"):
        RunSettings.from_run_config({"strategy": "fedlgd", "fedlgd.dp-epsilon": 1.0}).of_method(
            find_strategy("fedlgd")[1]
        )


def test_a_run_without_says_nothing(finished_run):
    assert privacy(read_run(finished_run(strategy="fedavg"))) is None


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"strategy": "cadis"}, r"'cadis' may need .* \(take one of analytic, fedadagrad"),
        ({"strategy": "krum"}, "'krum' may need"),
        ({"strategy": "scaffold"}, "'scaffold' may need"),
        ({"strategy": "agreement"}, "'agreement' may need"),
        ({"strategy": "flwr.serverapp.strategy:FedAvg"}, "'flwr.serverapp.strategy:FedAvg' may"),
        ({"strategy": "hfldd", "aggregator": "krum"}, "aggregator = 'krum'"),
        ({"strategy": "fedavg", "start": "analytic"}, "start = 'analytic'"),
        ({"strategy": "fedavg", "defence": "on"}, 'defence = "on"'),
    ],
)
def test_what_looks_at_single_models_is_refused_with_secure_sums(setting, reason):
    settings = RunSettings.from_run_config({**setting, "secure-sums": True})
    with pytest.raises(SettingsError, match=reason, check=at("secure-sums", value=True)):
        check_secure_sums(settings, find_strategy(settings.strategy)[1])
    plain = RunSettings.from_run_config(setting)
    check_secure_sums(plain, find_strategy(plain.strategy)[1])


def test_strategies_that_need_a_mean_alone_take_secure_sums():
    summed = {name for name, method in built_in_methods().items() if method.summed}
    assert {"fedavg", "fedprox", "fedavgm", "fedadam", "fedlgd", "hfldd"} <= summed
    own = {"hfldd.complete-clusters": False}
    for name in summed:
        settings = RunSettings.from_run_config({"strategy": name, "secure-sums": True, **own})
        check_secure_sums(settings, find_strategy(name)[1])
