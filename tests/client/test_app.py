"""The ClientApp: messages find their handlers, and what is not installed is named."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from PIL import Image
from safetensors.torch import save_file

from flwr_distill.client.app import app
from flwr_distill.client.session import Session
from flwr_distill.client.terms import LossTerm, Proximal, loss_terms
from flwr_distill.protocol.meeting import DESCRIBE, Requirement
from flwr_distill.protocol.registry import all_methods, check_config, phases_of
from flwr_distill.strategies.feddyn.method import DYNAMIC
from flwr_distill.strategies.hfldd.method import TRAIN_POOL
from flwr_distill.task.backbones import fingerprint
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.models import create_model, model_of
from flwr_distill.task.settings import TrainSettings
from tests.errors import at


@pytest.fixture
def context(tmp_path):
    node_config = {
        "partition-id": 3, "num-partitions": 20, "state-dir": str(tmp_path), "device": "cpu",
    }  # fmt: skip
    run_config = {"train.local-epochs": 1, "strategy": "someones"}
    return Context(1, 5, node_config, RecordDict(), run_config)


@pytest.fixture
def ask(context):
    """Content of the node's reply to a message."""

    def answered(message_type, content):
        message = Message(content, 5, message_type)
        message.metadata.__dict__["_message_id"] = "1"
        return app(message, context).content

    return answered


@pytest.fixture
def with_model(context):
    model = create_model("auto", Session.of(context).data.spec, seed=0)

    def content(**records):
        named = {name.replace("_", "-"): record for name, record in records.items()}
        return RecordDict({"arrays": ArrayRecord(model.state_dict()), **named})

    return content


def check(content, message_type, start, method=None):
    """Check a reply as the server does."""
    (allowed,) = phases_of(all_methods()[method] if method else None)[message_type].replies
    allowed.check(content, {name: array.numpy() for name, array in start["arrays"].items()})


@pytest.mark.parametrize("message_type", ["train.colours", "query.colours", "evaluate.colours"])
def test_a_message_type_that_nobody_handles_is_named_with_the_strategy(ask, message_type):
    with pytest.raises(SettingsError, match=message_type, check=at("strategy", value="someones")):
        ask(message_type, RecordDict())


def test_what_a_node_trains_plainly_is_what_the_server_takes(ask, with_model):
    content = with_model(config=ConfigRecord({"server-round": 1}))
    check(ask("train", content), "train", content)


def test_what_a_node_evaluates_is_what_the_server_takes(ask, with_model):
    content = with_model(config=ConfigRecord({"server-round": 1}))
    check(ask("evaluate", content), "evaluate", content)


@pytest.mark.parametrize("balanced", [False, True])
def test_a_head_trains_by_a_message_of_its_own(ask, with_model, balanced):
    config = ConfigRecord({"server-round": 1, "balanced": balanced})
    content = with_model(config=config)
    reply = ask(TRAIN_POOL, content)
    check(reply, TRAIN_POOL, content, "hfldd")
    assert reply["metrics"]["num-parcels"] == 0


def test_a_node_describes_itself_as_the_server_takes_it(ask, context):
    context.node_config |= {"sector": 4, "dataset": "digits", "name": "ward-3"}
    reply = ask(DESCRIBE, RecordDict())
    check(reply, DESCRIBE, RecordDict({"arrays": ArrayRecord()}))
    assert (reply["metrics"]["partition-id"], reply["metrics"]["sector"]) == (3, 4)
    session = Session.of(context)
    config = {
        "name": "ward-3",
        "dataset": "digits",
        "secret": session.store.place_secret(),
        "device": "cpu",
        "classes": session.data.train.labels.unique().tolist(),
        "fingerprint": session.store.keyed(session.data.fingerprint),
    }
    assert reply["config"] == ConfigRecord(config)


def needing(method, package="", **settings):
    """Content of a describe message."""
    requirement = Requirement(method=method, package=package, settings=json.dumps(settings))
    return RecordDict({"config": ConfigRecord(requirement.model_dump(by_alias=True))})


def test_a_node_that_lacks_the_package_of_a_run_says_what_to_install(ask):
    reply = ask(DESCRIBE, needing("colours", "colours==1.2"))
    assert reply["metrics"]["num-examples"] == 0
    assert "introduction" not in reply
    (reason,) = reply["config"]["missing"]
    assert "pip install 'colours==1.2'" in reason
    assert ask(DESCRIBE, needing("moon"))["metrics"]["num-examples"] > 0


@pytest.mark.parametrize(
    ("run_config", "settings", "said"),
    [
        ({"model": "no_such_nets:Net"}, {}, "model = 'no_such_nets:Net': module 'no_such_nets'"),
        ({"dataset": "no_such_sets:load"}, {}, "dataset = 'no_such_sets:load': module"),
        ({"dataset": "mnist", "data-root": "/nowhere"}, {}, "dataset = 'mnist': was not found"),
        ({"dataset": "private"}, {}, "start the node with --data FOLDER"),
        ({"partition.classes": 40}, {}, "partition"),
        ({}, {"distiller": "no_such_distillers:kip"}, "distiller = 'no_such_distillers:kip'"),
        ({}, {"distiller": "dm", "network": "no_such_nets:Net"}, "network = 'no_such_nets:Net'"),
        ({}, {"auxiliary": "/no/such/folder"}, "auxiliary = '/no/such/folder': is unknown"),
    ],
)
def test_what_a_node_lacks_for_a_run_it_says_in_its_first_message(
    ask, context, run_config, settings, said
):
    context.run_config |= run_config
    reply = ask(DESCRIBE, needing("hfldd", **settings))
    check(reply, DESCRIBE, RecordDict({"arrays": ArrayRecord()}))
    (reason,) = reply["config"]["missing"]
    assert said in reason
    assert "classes" not in reply["config"]


def test_a_node_with_other_frozen_weights_than_the_server_says_so(ask, context):
    context.run_config["model"] = "random-features"
    own = create_model("random-features", Session.of(context).data.spec, seed=0)
    for frozen, missing in ((fingerprint(own), False), ("0" * 64, True)):
        record = ConfigRecord(Requirement(frozen=frozen).model_dump(by_alias=True))
        reasons = ask(DESCRIBE, RecordDict({"config": record}))["config"].get("missing", [])
        assert len(reasons) == missing
        assert all("another frozen network on this node" in reason for reason in reasons)


def test_a_node_whose_file_of_weights_was_replaced_says_so_in_the_next_run(ask, context, tmp_path):
    file = tmp_path / "network.safetensors"
    context.run_config |= {"model": "random-features", "backbone.weights": str(file)}
    waves = torch.ones(1024, 64)
    for run_id, factor in ((1, 1.0), (2, 2.0), (3, 1.0)):  # in one process, as a warm node's
        save_file({"waves": factor * waves, "phases": torch.zeros(1024)}, file)
        context.run_id = run_id
        if run_id == 1:
            session = Session.of(context)
            served = fingerprint(model_of(session.task, session.data.spec))
        record = ConfigRecord(Requirement(frozen=served).model_dump(by_alias=True))
        missing = ask(DESCRIBE, RecordDict({"config": record}))["config"].get("missing", [])
        assert len(missing) == (factor != 1)


def test_a_node_names_its_class_folders_until_the_run_says_what_they_mean(ask, context, tmp_path):
    for name in ("dog", "cat"):
        (tmp_path / "data" / name).mkdir(parents=True)
        pixels = np.zeros((8, 8), np.uint8)
        Image.fromarray(pixels).save(tmp_path / "data" / name / "a.png")
    context.node_config["data"] = str(tmp_path / "data")
    context.run_config |= {"dataset": "private", "private.shape": "1x8x8"}
    config = ask(DESCRIBE, RecordDict())["config"]
    assert config["class-names"] == ["cat", "dog"]
    assert 'private.classes="cat,dog"' in config["missing"][0]
    context.run_config["private.classes"] = "ant,cat,bee,dog"
    config = ask(DESCRIBE, RecordDict())["config"]
    assert {*config} == {"secret", "classes", "fingerprint", "device"}
    assert config["classes"] == [1, 3]


@pytest.mark.parametrize(
    ("run_config", "settings"),
    [
        ({"train.dp-noise": 1.0}, {}),
        ({"hfldd.dp-epsilon": 1.0}, {}),
        ({}, {"dp-epsilon": 1.0, "start": "noise"}),
    ],
)
def test_with_differential_privacy_a_node_does_not_say_which_classes_it_holds(
    ask, context, run_config, settings
):
    context.run_config |= run_config
    reply = ask(DESCRIBE, needing("hfldd", **settings))
    assert {*reply["config"]} == {"secret", "fingerprint", "device"}


@pytest.mark.parametrize("record", [ConfigRecord({"x": 1}), MetricRecord({"x": 1})])
@pytest.mark.parametrize(("strategy", "remedy"), [("someones", "install"), ("moon", "declare")])
def test_a_record_that_no_loss_term_reads_is_named_with_what_to_do(
    ask, context, with_model, record, strategy, remedy
):
    context.run_config["strategy"] = strategy
    with pytest.raises(
        SettingsError, match="'brightness'", check=at("strategy", value=strategy)
    ) as caught:
        ask("train", with_model(brightness=record))
    assert remedy in caught.value.remedy


# Loss terms


@pytest.fixture
def terms(context):
    """Terms that a train message asks for."""
    session = Session.of(context)
    model = create_model("auto", session.data.spec, seed=0)

    def asked(settings=None, **records):
        named = {name.replace("_", "-"): record for name, record in records.items()}
        return loss_terms(session, RecordDict(named), model, settings or TrainSettings())

    return asked


def names(made):
    return [type(term).__name__ for term in made]


def test_nothing_is_added_that_nobody_asks_for(terms):
    assert terms() == []
    assert terms(config=ConfigRecord({"lr": 0.1, "proximal-mu": 0.0})) == []


def test_terms_are_made_of_records_of_the_message_and_of_settings(terms):
    settings = TrainSettings(proximal_mu=0.5, kd_lambda=0.1)
    asked = {DYNAMIC.replace("-", "_"): ConfigRecord({"alpha": 0.1})}
    assert sorted(names(terms(settings, **asked))) == ["Dynamic", "Proximal", "Relational"]


def test_of_two_methods_that_ask_by_one_key_the_term_is_made_once(terms):
    assert names(terms(TrainSettings(proximal_mu=0.5))) == ["Proximal"]


def with_terms(monkeypatch, paths):
    """Have a method of this name bring terms."""
    methods = dict(all_methods())
    methods["colours"] = replace(methods["fedavg"], name="colours", terms=paths)
    monkeypatch.setattr("flwr_distill.client.terms.all_methods", lambda: methods)


class Brightness(LossTerm):
    """Asked for by a key of the message's config that no setting knows."""

    def __init__(self, weight):
        self.weight = weight

    @classmethod
    def of(cls, session, content, model, settings):
        weight = content["config"]["brightness"]
        return cls(weight) if weight > 0.1 else None

    def __call__(self, inputs, labels, logits):
        return self.weight * inputs.mean()


class Unasked(LossTerm):
    def __call__(self, inputs, labels, logits):
        return logits.square().mean()


class Mixing(Brightness):
    mixes = "batch"


def test_a_key_of_the_config_asks_for_a_term_which_may_decline(terms, monkeypatch):
    with_terms(monkeypatch, {"brightness": f"{__name__}:Brightness"})
    (made,) = terms(config=ConfigRecord({"brightness": 2.0}))
    assert made.weight == 2.0
    assert terms(config=ConfigRecord({"brightness": 0.05})) == []
    assert terms(config=ConfigRecord({"brightness": 0.0})) == []


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no_such_module_of_colours:X", "no_such_module_of_colours"),
        (f"{__name__}:Nope", "Nope"),
        ("json:loads", "LossTerm"),
        ("json:JSONDecoder", "LossTerm"),
        (f"{__name__}:Unasked", "does not define of"),  # it would be ignored in silence
        (f"{__name__}:Mixing", "mixes"),
    ],
)
def test_a_term_that_cannot_be_used_is_named_with_its_method(terms, monkeypatch, path, said):
    with_terms(monkeypatch, {"brightness": path})
    with pytest.raises(SettingsError, match=said, check=at("loss term of 'colours'")):
        terms(config=ConfigRecord({"brightness": 1.0}))


def test_a_term_says_what_its_value_mixes():
    assert LossTerm.mixes == "minibatch"  # so that differential privacy refuses what says nothing
    assert Brightness.mixes == "minibatch"
    assert Proximal.mixes == "weights"


def test_a_key_in_the_config_of_a_train_message_that_nothing_reads_is_refused(ask, with_model):
    config = ConfigRecord({"lr": 0.1, "server-round": 1, "temperature": 2.0})
    with pytest.raises(SettingsError, match=r"'temperature'.*local-epochs"):
        ask("train", with_model(config=config))


def test_a_key_in_the_config_of_an_evaluate_message_that_nothing_reads_is_refused(ask, with_model):
    config = ConfigRecord({"server-round": 1, "temperature": 2.0})
    with pytest.raises(SettingsError, match=r"evaluate.*'temperature'"):
        ask("evaluate", with_model(config=config))


@pytest.mark.parametrize("name", sorted({*all_methods()}))
def test_every_key_that_a_methods_train_phase_declares_is_one_that_nodes_read(name):
    phase = phases_of(all_methods()[name])["train"]
    keys = [field.alias for field in phase.request.configs["config"].model_fields.values()]
    check_config(Message(RecordDict({"config": ConfigRecord(dict.fromkeys(keys, 1))}), 1, "train"))
