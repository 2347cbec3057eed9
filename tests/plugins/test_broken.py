"""Packages that cannot be used: what is said of them, and that nothing else suffers."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from flwr.app import Context, Message, RecordDict
from PIL import Image

from flwr_distill.client.app import app
from flwr_distill.protocol.registry import all_methods, find_method, handlers
from flwr_distill.server.rounds import NothingLearntError
from flwr_distill.server.settings import composed_settings
from flwr_distill.strategies.common.registry import find_strategy
from flwr_distill.strategies.common.waiting import TooFewNodesError
from flwr_distill.task.datasets import load_dataset
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.models import ModelError, create_model
from flwr_distill.task.plugin import PluginError
from flwr_distill.task.survey import survey

ROOT = Path(__file__).resolve().parents[2]
METHOD = (
    "from flwr_distill.protocol.method import Method, Phase\n"
    "from flwr_distill.task.settings import Block\n"
)
STRATEGY = "from flwr.serverapp.strategy import FedAvg\nclass Mine(FedAvg): pass\n"


def refused(name):
    """What is said of a method that is asked for."""
    with pytest.raises(SettingsError) as caught:
        find_strategy(name)
    return str(caught.value)


@pytest.mark.parametrize(
    ("source", "reason", "line"),
    [
        ("x = 1\nimport no_such_thing\n", "No module named 'no_such_thing'", 2),
        ("x = 1\n\nx.y\n", "AttributeError", 3),
        ("def f(:\n", "SyntaxError", 1),
    ],
)
def test_a_module_that_fails_is_named_with_package_reason_and_line(install, source, reason, line):
    site = install("mine", source, mine="mine:METHOD")
    text = refused("mine")
    for part in ("method 'mine' of someones==1.0", "mine:METHOD", reason, f"line {line})"):
        assert part in text
    assert str(site / "mine.py") in text


def test_a_strategy_that_fails_to_import_is_named_with_setting_package_and_line(install):
    source = METHOD + "METHOD = Method('mine', 'mine_server:Mine')\n"
    site = install("mine", source, mine="mine:METHOD")
    (site / "mine_server.py").write_text("x = 1\ny = x / 0\n")
    text = refused("mine")
    for part in (
        "strategy = 'mine': of someones==1.0, on the server",
        "module 'mine_server'",
        "ZeroDivisionError",
        "line 2)",
    ):
        assert part in text


def test_a_handler_that_fails_to_import_is_named_on_the_node(install):
    source = METHOD + (
        "METHOD = Method('mine', 'mine:X', "
        "phases=(Phase('query.mine', 'nodes do', (), 'mine_client:do'),))\n"
    )
    site = install("mine", source, mine="mine:METHOD")
    (site / "mine_client.py").write_text("import no_such_thing\n")
    with pytest.raises(
        ValueError, match=r"'mine_client' cannot be imported: .*no_such_thing.*line 1"
    ):
        app(Message(RecordDict(), 1, "query.mine"), Context(1, 1, {}, RecordDict(), {}))


def test_a_loss_term_that_fails_to_import_is_named_and_hurts_its_method_alone(install, run, rows):
    source = (
        STRATEGY
        + METHOD
        + (
            "from flwr.app import ConfigRecord\n"
            "class Asks(FedAvg):\n"
            "    def configure_train(self, *arguments):\n"
            "        for message in super().configure_train(*arguments):\n"
            "            message.content['mine'] = ConfigRecord({'on': 1})\n"
            "            yield message\n"
            "METHOD = Method('mine', 'mine:Asks', terms={'mine': 'mine_client:Term'})\n"
        )
    )
    install("mine", source, mine="mine:METHOD")
    with pytest.raises(TooFewNodesError, match="module 'mine_client' cannot be imported"):
        run(strategy="mine", num_rounds=1)
    assert len(rows(run(strategy="fedavg", num_rounds=1, run_id=8))) == 2


TERM = (
    METHOD
    + """
from flwr.app import ConfigRecord
from flwr_distill.client.terms import LossTerm
from flwr_distill.protocol.method import all_protected
from flwr_distill.strategies.common.checked import CheckedFedAvg

class Mine(CheckedFedAvg):
    def records(self):
        return {"calm": ConfigRecord({"on": 1})}

class Calm(LossTerm):
    @classmethod
    def of(cls, session, content, model, settings):
        return cls()

    def __call__(self, inputs, labels, logits):
        return RETURNED

METHOD = Method("mine", "mine:Mine", terms={"calm": "mine:Calm"}, unprotected=all_protected)
"""
)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("logits", "scalar"),
        ("None", "NoneType"),
        ("logits[:, 99]", r"mine\.py, line 19"),
    ],
)
def test_a_loss_term_that_fails_is_named_with_its_method(install, run, returned, said):
    install("mine", TERM.replace("RETURNED", returned), mine="mine:METHOD")
    with pytest.raises(NothingLearntError) as caught:
        run(strategy="mine", num_rounds=1)
    assert re.search(said, str(caught.value))
    assert "loss term Calm of 'mine'" in str(caught.value)


def test_a_term_that_mixes_samples_is_refused_with_privacy_before_training(install, run, sent):
    install("mine", TERM.replace("RETURNED", "logits.mean()"), mine="mine:METHOD")
    with pytest.raises(TooFewNodesError, match=r"dp-noise = 1\.0: the loss term Calm of 'mine'"):
        run(strategy="mine", train__dp_noise=1.0)
    with pytest.raises(TooFewNodesError, match="loss term Relational of 'cadis'"):
        run(strategy="fedavg", train__dp_noise=1.0, train__kd_lambda=0.1, run_id=8)
    assert sent("train") == []


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (f"{STRATEGY}METHOD = 'mine'\n", "mine:METHOD is a str, need a protocol.method.Method"),
        (f"{METHOD}METHOD = Method('yours', 'mine:X')\n", "declares itself as 'yours'"),
        ("x = 1\n", "has no attribute 'METHOD'"),
    ],
)
def test_an_entry_point_to_no_method_of_this_name_is_refused(install, source, said):
    install("mine", source, mine="mine:METHOD")
    text = refused("mine")
    assert said in text
    assert "someones==1.0" in text


def test_an_entry_point_to_a_class_that_is_no_strategy_is_refused(install):
    install("mine", "class Mine: pass\n", mine="mine:Mine")
    assert "mine:Mine is not a flwr.serverapp.strategy.Strategy" in refused("mine")


def test_a_name_that_is_taken_by_one_of_ours_is_refused_and_ours_is_not_replaced(install, caplog):
    install("mine", STRATEGY, moon="mine:Mine")
    assert "the name is taken by a method of flwr-distill (rename it)" in refused("moon")
    assert all_methods()["moon"].strategy == "flwr_distill.strategies.moon.strategy:MOON"
    assert "method 'moon' of someones==1.0" in caplog.text


def test_two_packages_with_one_name_are_both_named_and_neither_is_taken(install):
    install("mine", STRATEGY, mine="mine:Mine")
    install("other", STRATEGY, name="others", version="2.0", mine="other:Mine")
    text = refused("mine")
    assert "someones==1.0" in text
    assert "others==2.0" in text
    assert "mine" not in all_methods()


@pytest.mark.parametrize(
    ("declared", "taken"),
    [
        ("phases=(Phase('train.pool', 'x', (), 'mine:train'),)", "train.pool"),
        ("phases=(Phase('query.describe', 'x', (), 'mine:train'),)", "query.describe"),
        ("phases=(Phase('train', 'x', (), 'mine:train'),)", "train"),
        ("terms={'proximal-mu': 'mine:Term'}", "proximal-mu"),
        ("terms={'control-variate': 'mine:Term'}", "control-variate"),
    ],
)
def test_what_is_ours_cannot_be_given_another_meaning(install, declared, taken):
    before = handlers()
    install("mine", f"{METHOD}METHOD = Method('mine', 'mine:X', {declared})\n", mine="mine:METHOD")
    assert f"{taken!r} is taken by flwr-distill (rename it)" in refused("mine")
    assert handlers() == before


@pytest.mark.parametrize(
    ("kind", "name"),
    [("models", "digits-cnn"), ("datasets", "digits"), ("distillers", "kip")],
)
def test_a_model_data_set_or_distiller_cannot_take_the_name_of_one_of_ours(install, kind, name):
    source = f"{METHOD}METHOD = Method('mine', {kind}={{{name!r}: 'mine:X'}})\n"
    install("mine", source, mine="mine:METHOD")
    with pytest.raises(SettingsError, match=f"someones==1.0: '{name}' is taken by flwr-distill"):
        find_method("mine")


@pytest.mark.parametrize(
    ("declared", "shared"),
    [
        ("phases=(Phase('query.means', 'x', (), '{}:tell'),)", "query.means"),
        ("terms={{'calm': '{}:Calm'}}", "calm"),
    ],
)
def test_two_packages_with_one_message_type_or_record_are_both_named(install, declared, shared):
    def source(module):
        return f"{METHOD}METHOD = Method({module!r}, {declared.format(module)})\n"

    install("mine", source("mine"), mine="mine:METHOD")
    install("yours", source("yours"), name="others", version="2.0", yours="yours:METHOD")
    for name in ("mine", "yours"):
        with pytest.raises(SettingsError, match=f"'{shared}' is also of method") as caught:
            find_method(name)
        assert "someones==1.0" in str(caught.value)
        assert "others==2.0" in str(caught.value)
    assert not {"mine", "yours"} & all_methods().keys()


def test_two_packages_with_one_model_are_both_named(install):
    def source(module):
        return f"{METHOD}METHOD = Method({module!r}, models={{'wide': '{module}:Wide'}})\n"

    install("mine", source("mine"), mine="mine:METHOD")
    install("yours", source("yours"), name="others", version="2.0", yours="yours:METHOD")
    with pytest.raises(ModelError, match=r"model = 'wide': comes with others==2\.0 and some"):
        create_model("wide", load_dataset("digits").spec)


THINGS = """
from torch import nn
from flwr.serverapp.strategy import FedAvg

class Unmade(nn.Module):
    def __init__(self, spec):
        {}["width"]

class Unfit(nn.Flatten):
    def forward(self, inputs):
        return inputs.nothing

class Strict(FedAvg):
    def __init__(self, **kwargs):
        raise KeyError("depth")

def load(root, download):
    return open("no-such-file")
"""


@pytest.mark.parametrize(
    ("settings", "said", "line"),
    [
        ({"model": "things:Unmade"}, "model = 'things:Unmade': fails with KeyError", 7),
        ({"model": "things:Unfit"}, "model = 'things:Unfit': cannot take images", 11),
        ({"dataset": "things:load"}, "dataset = 'things:load': fails with FileNotFound", 18),
        ({"strategy": "things:Strict"}, "strategy = 'things:Strict', strategy-args = {}", 15),
    ],
)
def test_code_that_fails_when_it_is_used_is_named_with_setting_file_and_line(
    on_path, tmp_path, run, settings, said, line
):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "things.py").write_text(THINGS)
    on_path(tmp_path / "site")
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        run(
            **{
                "strategy": "fedavg",
                "model": "mlp" if "dataset" in settings else "auto",
                **settings,
            }
        )
    assert f"things.py, line {line})" in str(caught.value)
    assert run.grid.pushed == []


def test_a_handler_that_fails_on_a_node_is_named_with_file_and_line(install):
    source = METHOD + (
        "def tell(message, context):\n    return message['nothing']\n"
        "METHOD = Method('mine', phases=(Phase('query.mine', 'nodes do', (), 'mine:tell'),))\n"
    )
    install("mine", source, mine="mine:METHOD")
    context = Context(1, 1, {}, RecordDict(), {"strategy": "mine"})
    with pytest.raises(PluginError, match=r"plug-in failed: TypeError: .*mine\.py, line 4\)"):
        app(Message(RecordDict(), 1, "query.mine"), context)


def test_a_package_may_use_our_phases_and_terms_as_they_are(install):
    source = METHOD + (
        "from flwr_distill.strategies.scaffold.method import METHODS\n"
        "(ours,) = METHODS\n"
        "METHOD = Method('mine', 'mine:X', phases=ours.phases, terms=ours.terms)\n"
    )
    install("mine", source, mine="mine:METHOD")
    assert find_method("mine").phases


@pytest.mark.parametrize("table", ["train", "hfldd", "num-rounds"])
def test_a_table_of_settings_cannot_take_the_name_of_others(install, table):
    source = METHOD + (
        "class Own(Block):\n    x: int = 1\n"
        f"METHOD = Method('mine', 'mine:X', settings=Own, table={table!r})\n"
    )
    install("mine", source, mine="mine:METHOD")
    with pytest.raises(SettingsError, match=f"its table, {table}, is taken by other settings"):
        composed_settings()


def test_runs_of_other_methods_go_on_beside_a_broken_package_which_is_named_once(
    install, run, rows, caplog
):
    install("mine", "import no_such_thing\n", mine="mine:METHOD")
    folder = run(strategy="fedavg", num_rounds=1)
    assert len(rows(folder)) == 2
    assert caplog.text.count("method 'mine' of someones==1.0") == 1


def test_a_broken_reader_is_logged_and_others_read_on(install, tmp_path, caplog):
    install("mine", "x = 1\n", readers={"r": "mine:LOST"})
    for name in "ab":
        (tmp_path / "own" / name).mkdir(parents=True)
        Image.new("L", (4, 2)).save(tmp_path / "own" / name / "1.png")
    found = survey(tmp_path / "own")
    assert found.counts == {"a": 1, "b": 1}
    assert "mine:LOST" in caplog.text


@pytest.mark.parametrize("room", ["client", "strategies"])
def test_a_checkouts_folder_is_not_imported_as_a_second_copy(room):
    done = subprocess.run(
        [sys.executable, "-c", f"import {room}"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert f"import flwr_distill.{room}" in done.stderr
