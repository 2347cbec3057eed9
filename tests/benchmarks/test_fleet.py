"""The fleet benchmark: light nodes answer as a node does, and percentiles are by rank."""

from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supernode import start_client_internal as loop
from flwr.supernode.nodestate import NodeStateFactory

from benchmarks import fleet, light_nodes
from flwr_distill.fleet.submission import RunError


def test_a_light_node_answers_a_message_with_the_arrays_moved_and_keeps_nothing_of_it():
    objects = ObjectStoreFactory()
    state, store = NodeStateFactory(objects).state(), objects.store()
    content = RecordDict({"arrays": ArrayRecord([np.ones(3, "f4")]), "config": ConfigRecord()})
    message = Message(content, 5, "train")
    message.metadata.__dict__["_run_id"] = 7
    loop._insert_message(message, state, store)
    light_nodes.answer(state, store)
    (header,) = getattr(state, "get_messages_legacy", state.get_messages)(is_reply=True)
    name = header.metadata.message_id
    parts = [part.object_id for part in iterate_object_tree(store.get_object_tree(name))]
    reply = inflate_object_from_contents(name, {part: store.get(part) for part in parts})
    assert reply.metadata.reply_to_message_id == message.metadata.message_id
    (array,) = reply.content["arrays"].to_numpy_ndarrays()
    assert array.shape == (3,)
    assert (array > 1).all()
    store.delete(name)
    assert len(store) == 0


@pytest.mark.parametrize(("count", "rank"), [(1, 1), (3, 3), (19, 19), (20, 19), (100, 95)])
def test_the_95th_percentile_is_one_of_the_values(count, rank):
    assert fleet.percentile_95([float(value) for value in range(count, 0, -1)]) == rank


def test_phases_that_take_too_long_give_what_was_seen_and_why(monkeypatch):
    def too_long(*args, on_line, **kwargs):
        for seconds in (9.0, 1.0, 3.0):
            on_line(f"PHASE {seconds} 4 0")
        raise RunError("stopped after 600 s")

    monkeypatch.setattr(fleet, "run", too_long)
    monkeypatch.setattr(fleet, "cpu", lambda superlink: 0.0)
    light = SimpleNamespace(size=4, tell=lambda: light_nodes.Told(0, 0, 0, 0, 4))
    row = fleet.phases(None, light, 10, ours=False, share=1.0)
    assert row["phases"] == 2  # the first one loads the app
    assert row["phase_p50"] == 2.0
    assert row["failed"] == "stopped after 600 s"
