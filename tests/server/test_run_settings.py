"""Settings of a run: a table for each method, and what strategy-args change of the run's own."""

import pytest

from flwr_distill.protocol.registry import built_in_methods, find_method
from flwr_distill.server.settings import RunSettings
from flwr_distill.task.errors import SettingsError
from tests.errors import at


def settings(**config):
    return RunSettings.from_run_config(config)


def test_every_method_with_settings_has_its_table_and_reads_its_own():
    with_settings = {m.name: m for m in built_in_methods().values() if m.settings}
    assert {"hfldd", "moon", "feddyn", "fedfa"} <= with_settings.keys()
    for method in with_settings.values():
        of_method = settings().of_method(method)
        assert isinstance(of_method, method.settings)
        assert settings().model_dump(by_alias=True)[method.table_name] == of_method.model_dump(
            by_alias=True
        )
    assert settings().of_method(find_method("fedavg")) is None
    assert settings().of_method(None) is None


def test_methods_that_share_a_table_read_the_same_settings():
    run = settings(**{"fedhead.sectors": 5})
    found = [run.of_method(find_method(name)).sectors for name in ("fedhead", "fedhead-plus")]
    assert found == [5, 5]


@pytest.mark.parametrize("key", ["kd-lambda", "kd_lambda"])
def test_strategy_args_win_over_the_table_and_the_rest_is_for_the_constructor(key):
    told = f'{{"{key}": 2.5, "weighted_by_key": "x"}}'
    run = settings(**{"cadis.kd-lambda": 0.5, "strategy-args": told})
    cadis = find_method("cadis")
    assert run.of_method(cadis).kd_lambda == 2.5
    assert run.constructor_arguments(cadis) == {"weighted_by_key": "x"}
    assert run.constructor_arguments(None) == {key: 2.5, "weighted_by_key": "x"}


def test_defence_sets_the_rules_of_the_method_unless_they_are_set_already():
    cadis, run = find_method("cadis"), settings()
    assert run.defended(cadis) is run
    chosen = settings(**{"defence": "on", "cadis.most-say": 3.0}).defended(cadis)
    assert (chosen.of_method(cadis).rule, chosen.of_method(cadis).most_say) == ("agreement", 3.0)
    assert chosen.defended(cadis) == chosen


def test_every_rule_that_a_method_declares_is_a_setting_and_is_set():
    declared = [method for method in built_in_methods().values() if "defence" in method.defaults]
    assert {"fedavg", "hfldd", "fedhead", "cadis", "fedlgd", "moon"} <= {
        method.name for method in declared
    }
    for method in declared:
        run = settings(strategy=method.name, defence="on").defended(method)
        table = run.model_dump(by_alias=True)
        for key, value in method.defaults["defence"].items():
            of, _, name = key.rpartition(".")
            assert (table[of] if of else table)[name] == value


def test_a_method_without_rules_refuses_the_defence_and_names_those_that_have_some():
    with pytest.raises(SettingsError, match=r"'fednova' declares no rules .* cadis, fedavg"):
        settings(defence="on", strategy="fednova").defended(find_method("fednova"))


def test_fedavg_defends_itself_as_another_strategy_and_a_class_of_ones_own_is_not_replaced():
    fedavg = find_method("fedavg")
    chosen = settings(defence="on", strategy="fedavg", seed=3).defended(fedavg)
    assert (chosen.strategy, chosen.seed) == ("agreement", 3)
    assert chosen.defended(find_method("agreement")) == chosen
    own = settings(defence="on", strategy="flwr.serverapp.strategy:FedAdam")
    with pytest.raises(SettingsError, match="FedAdam' declares no rules"):
        own.defended(fedavg)


def test_a_value_of_strategy_args_that_a_method_cannot_have_is_named():
    run = settings(**{"strategy-args": '{"mu": -1}'})
    with pytest.raises(SettingsError, match=r"strategy-args: mu = -1(\.0)?: should be"):
        run.of_method(find_method("moon"))


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("nosuch.mu", "nosuch"),
        ("moon.nosuch", "did you mean moon.mu"),
        ("fedhead-plus.sectors", "did you mean fedhead.sec"),
        ("hfldd", "hfldd"),
    ],
)
def test_a_table_or_key_that_no_method_has_is_refused(key, remedy):
    with pytest.raises(SettingsError, match=remedy, check=at(key)):
        settings(**{key: 1})
