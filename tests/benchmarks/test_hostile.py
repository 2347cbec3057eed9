"""A benchmark's hostile nodes: what they send is their model as the attack makes it."""

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from benchmarks.hostile import ATTACKS, hostile
from protocol.arrays import as_arrays
from task.datasets import load_dataset
from task.models import create_model

CONFIG = {"train.local-epochs": 1}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_node_sends_what_the_attack_makes_of_what_it_trained(client_grid, attack):
    start = create_model("auto", load_dataset("digits").spec, seed=0).state_dict()
    sent = []
    for wrap in (lambda node, attack: node, hostile):
        (node,) = client_grid(1, CONFIG).nodes.values()
        config = ConfigRecord({"server-round": 1, "lr": 0.05})
        message = Message(RecordDict({"arrays": ArrayRecord(start), "config": config}), 5, "train")
        message.metadata.__dict__["_message_id"] = "1"
        sent.append(as_arrays(wrap(node, attack)(message)["arrays"]))
    honest, spoiled = sent
    for name, weights in start.items():
        expected = ATTACKS[attack](weights.numpy(), honest[name])
        np.testing.assert_allclose(spoiled[name], expected, rtol=1e-3, atol=1e-3, err_msg=name)
