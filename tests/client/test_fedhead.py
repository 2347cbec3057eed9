"""A node in its sector: what a leader keeps is bounded, and nothing but ranks names its files."""

import json

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from safetensors.numpy import save

import flwr_distill.strategies.fedhead.client
from flwr_distill.client.app import app
from flwr_distill.client.session import Session
from flwr_distill.protocol.arrays import arrays_of, as_arrays
from flwr_distill.strategies.common.ensemble import EnsembleDistillation
from flwr_distill.strategies.fedhead.client import MEMBERS, OWN, distil_sector, mean_of_sector
from flwr_distill.strategies.fedhead.method import (
    AGGREGATE_SECTOR,
    GLOBAL_MODEL,
    HAND_OUT,
    TRAIN_SECTOR,
)
from flwr_distill.task.models import create_model

NODE = 2**64 - 5


@pytest.fixture
def context(tmp_path):
    node_config = {"partition-id": 0, "num-partitions": 5, "state-dir": str(tmp_path)}
    return Context(1, NODE, node_config, RecordDict(), {"train.local-epochs": 1})


@pytest.fixture
def session(context):
    return Session.of(context)


@pytest.fixture
def ask(context):
    """Content of the node's reply to a message."""

    def answered(message_type, content):
        message = Message(content, NODE, message_type)
        message.metadata.__dict__["_message_id"] = "1"
        return app(message, context).content

    return answered


def config(**values):
    return RecordDict({"config": ConfigRecord({k.replace("_", "-"): v for k, v in values.items()})})


def with_model(content, session, seed=0):
    model = create_model("auto", session.data.spec, seed=seed)
    content["arrays"] = ArrayRecord(model.state_dict())
    return content


def test_what_plain_training_made_goes_to_the_server_and_is_not_kept(ask, session):
    content = with_model(config(), session)
    reply = ask("train", content)
    assert sorted(reply) == ["arrays", "metrics"]
    assert reply["arrays"].keys() == content["arrays"].keys()
    assert session.store.names() == []


def test_what_a_leader_trains_stays_with_it(ask, session):
    reply = ask(TRAIN_SECTOR, with_model(config(leads=True, server_round=1), session))
    assert list(reply) == ["metrics"]
    assert len(session.store.names()) == 2  # the model as it came, and as it was trained


def test_a_leader_keeps_its_model_and_one_round_takes_the_place_of_another(ask, session):
    for seed in (1, 2):
        content = with_model(config(leads=True, lr=1e-9, server_round=seed), session, seed)
        ask(TRAIN_SECTOR, content)  # which hardly changes the model
        mean = mean_of_sector(session, config(**{f"num-examples.{OWN}": 7, "server_round": seed}))
        assert mean.rejected == {}
        for name, value in as_arrays(content["arrays"]).items():
            assert abs(mean.arrays[name] - value).max() < 1e-6
    # the model as it came and as it was trained, and which round's it is
    assert len(session.store.names()) == 3


def test_a_leader_trains_the_model_that_it_handed_out(ask, session):
    content = with_model(RecordDict(), session, seed=3)
    assert not ask(HAND_OUT, content)
    assert session.store.names() == [GLOBAL_MODEL]
    again = config(leads=True, lr=1e-9, server_round=1)
    ask(TRAIN_SECTOR, again)
    mean = mean_of_sector(session, config(**{f"num-examples.{OWN}": 7, "server_round": 1}))
    for name, value in as_arrays(content["arrays"]).items():
        assert abs(mean.arrays[name] - value).max() < 1e-6


def test_no_usable_model_is_an_error_that_says_so(ask):
    with pytest.raises(ValueError, match="no models to take the mean of"):
        ask(AGGREGATE_SECTOR, config(server_round=1))


def test_a_rank_that_is_no_number_is_refused(ask):
    content = config(server_round=1)
    content["delivery.../../evil"] = ConfigRecord()
    with pytest.raises(ValueError, match="rank is no number"):
        ask(AGGREGATE_SECTOR, content)


@pytest.mark.parametrize(
    ("rule", "size", "cut"), [("trimmed-mean", 4, 0), ("trimmed-mean", 5, 2), ("agreement", 5, 0)]
)
def test_a_teacher_is_trimmed_where_the_mean_is(session, monkeypatch, rule, size, cut):
    model = create_model("auto", session.data.spec)
    for rank in range(size):
        session.store.write(f"sector-model-{rank}", save(arrays_of(model)))
    members = {"server-round": 1, "rule": rule, "weights": [(rank, 1.0) for rank in range(size)]}
    session.store.write(MEMBERS, json.dumps(members).encode())
    found, teach = [], flwr_distill.strategies.fedhead.client.teacher_probabilities

    def noted(*args, **options):
        found.append(options["cut"])
        return teach(*args, **options)

    monkeypatch.setattr(flwr_distill.strategies.fedhead.client, "teacher_probabilities", noted)
    distil_sector(session, model, EnsembleDistillation(distill_epochs=1), 1)
    assert found == [cut]
