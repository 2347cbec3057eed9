"""What terms keep on a node: FedDyn's gradient, SCAFFOLD's c_i, MOON's previous model."""

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from flwr_distill.client.app import app
from flwr_distill.client.session import Session
from flwr_distill.client.terms import store_tensors, stored_tensors
from flwr_distill.strategies.feddyn.method import DYNAMIC
from flwr_distill.strategies.moon.method import MODEL_CONTRAST
from flwr_distill.strategies.scaffold.method import CONTROL_VARIATE
from flwr_distill.task.datasets import load_dataset
from flwr_distill.task.models import create_model

MODEL = create_model("auto", load_dataset("digits").spec, seed=0)
RECORDS = {
    "feddyn-gradient": (DYNAMIC, ConfigRecord({"alpha": 0.1})),
    "control-variate": (CONTROL_VARIATE, ArrayRecord()),
    "moon-previous": (MODEL_CONTRAST, ConfigRecord({"mu": 1.0, "temperature": 0.5})),
}


@pytest.fixture
def context(tmp_path):
    config = {"partition-id": 0, "num-partitions": 20, "state-dir": str(tmp_path), "device": "cpu"}
    return Context(3, 5, config, RecordDict(), {"train.local-epochs": 1})


@pytest.fixture
def session(context):
    return Session.of(context)


def train(context, record, state=None, **config):
    """Content of the node's reply to a train message with the record."""
    name, asked = record
    arrays = ArrayRecord(MODEL.state_dict() if state is None else state)
    content = RecordDict({name: asked, "config": ConfigRecord(config), "arrays": arrays})
    message = Message(content, 5, "train")
    message.metadata.__dict__["_message_id"] = "1"
    return app(message, context).content


def test_what_is_kept_comes_back_equal(session):
    tensors = {"a": torch.randn(3, 2), "b": torch.arange(4)}
    assert stored_tensors(session, "state", tensors) is None
    store_tensors(session, "state", tensors)
    back = stored_tensors(session, "state", tensors)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("like", [{"a": torch.zeros(3)}, {"b": torch.zeros(2)}, {}])
def test_what_is_kept_of_another_model_begins_anew_with_a_line_in_the_log(
    session, like, flower_log
):
    store_tensors(session, "state", {"a": torch.zeros(2)})
    assert stored_tensors(session, "state", like) is None
    assert "another model" in flower_log.text


def test_a_torn_file_begins_anew_with_a_line_in_the_log(session, flower_log):
    session.store.write("state", b"\x01\x02")
    assert stored_tensors(session, "state", {"a": torch.zeros(2)}) is None
    assert "cannot be read" in flower_log.text


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_does_not_replace_what_was_kept(session, bad, flower_log):
    store_tensors(session, "state", {"a": torch.ones(2)})
    store_tensors(session, "state", {"a": torch.tensor([bad, 1.0])})
    assert torch.equal(stored_tensors(session, "state", {"a": torch.ones(2)})["a"], torch.ones(2))
    assert "not stored" in flower_log.text


@pytest.mark.parametrize("name", RECORDS)
def test_a_restarted_node_goes_on_with_what_it_kept(context, session, name):
    """A second round differs from the same round on a node that kept nothing."""
    train(context, RECORDS[name])
    assert session.store.read(name) is not None
    second = train(context, RECORDS[name])["arrays"]["0.weight"].numpy()
    for file in session.store.names():
        (session.store.folder / file).unlink()
    first = train(context, RECORDS[name])["arrays"]["0.weight"].numpy()
    assert abs(second - first).max() > 1e-6


@pytest.mark.parametrize("name", RECORDS)
def test_training_that_diverges_leaves_what_is_kept_finite(context, session, name):
    train(context, RECORDS[name], lr=1e30)
    assert session.store.read(name) is None


def test_a_control_variate_of_another_model_is_refused(context):
    record = (CONTROL_VARIATE, ArrayRecord({"odd": torch.zeros(2)}))
    with pytest.raises(ValueError, match="control-variate odd is not part of this run's model"):
        train(context, record)


def test_a_message_may_bring_the_control_variate_before_the_model(context):
    reply = train(context, RECORDS["control-variate"])
    assert reply["arrays"].keys() == MODEL.state_dict().keys()
    assert set(reply["control-variate"]) == {name for name, _ in MODEL.named_parameters()}
