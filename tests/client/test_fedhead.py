"""A node in its sector: what a leader keeps is bounded, and nothing but ranks names its files."""

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict

from client.fedhead import OWN, aggregate_sector, hand_in, hand_out, received_arrays
from client.session import Session
from task.models import create_model


@pytest.fixture
def session(tmp_path):
    node_config = {"partition-id": 0, "num-partitions": 5, "state-dir": str(tmp_path)}
    return Session.of(Context(1, 2**64 - 5, node_config, RecordDict(), {}))


def config(**values):
    return RecordDict({"config": ConfigRecord({k.replace("_", "-"): v for k, v in values.items()})})


def model_of(session, seed=0):
    return create_model("auto", session.data.spec, seed=seed)


def test_without_a_route_the_model_goes_to_the_server(session):
    model = model_of(session)
    reply = hand_in(session, RecordDict(), model)
    assert list(reply) == ["arrays"]
    assert reply["arrays"].keys() == model.state_dict().keys()
    assert session.store.names() == []


def test_a_leader_keeps_its_model_and_one_round_takes_the_place_of_another(session):
    for seed in (1, 2):
        model = model_of(session, seed)
        assert not hand_in(session, config(leads=True), model)
        content = config(**{f"num-examples.{OWN}": 7, "server_round": seed})
        mean = aggregate_sector(session, content)
        assert (mean.num_examples, mean.rejected) == (7, {})
        for name, value in model.state_dict().items():
            assert (mean.arrays[name] == value.numpy()).all()
    assert len(session.store.names()) == 2  # the model, and which round's it is


def test_a_leader_trains_the_model_that_it_handed_out(session):
    model = model_of(session, seed=3)
    content = RecordDict({"arrays": ArrayRecord(model.state_dict())})
    assert not hand_out(session, content)
    kept = received_arrays(session, config(leads=True))
    assert all((kept[name] == value.numpy()).all() for name, value in model.state_dict().items())


def test_no_usable_model_is_an_error_that_says_so(session):
    with pytest.raises(ValueError, match="no models to take the mean of"):
        aggregate_sector(session, config(server_round=1))


def test_a_rank_that_is_no_number_is_refused(session):
    content = config(server_round=1)
    content["delivery.../../evil"] = ConfigRecord()
    with pytest.raises(ValueError, match="invalid literal"):
        aggregate_sector(session, content)
