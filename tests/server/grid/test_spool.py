"""Replies whose arrays wait on disk, because memory does not hold those of all nodes."""

import gc
import os
import sys
import tempfile
import tracemalloc

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from flwr_distill.protocol.arrays import RecordArrays, as_record, sent_arrays
from flwr_distill.server.grid import transport
from flwr_distill.server.grid.ledger import UP
from flwr_distill.server.grid.spool import IN_MEMORY, Spool, SpoolError, StoredArray
from flwr_distill.strategies.common.averages import weighted_mean
from flwr_distill.strategies.common.checked import CheckedFedAvg
from tests.errors import at
from tests.grids import plain_grid


def model(seed, size=1000):
    rng = np.random.default_rng(seed)
    return {
        "weight": rng.standard_normal((size, 10)).astype(np.float32),
        "bias": rng.standard_normal(size).astype(np.float32),
        "steps": np.array(seed),
    }


def trained(seed, size=1000):
    metrics = MetricRecord({"num-examples": seed, "train-loss": 0.5})
    return RecordDict({"arrays": as_record(model(seed, size)), "metrics": metrics})


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype


def nameless_files():
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return sum(os.path.exists(link) and "(deleted)" in os.readlink(link) for link in links)


def phase(memory_grid, monkeypatch, in_memory, nodes=(1, 2, 3)):
    monkeypatch.setattr(transport, "Spool", lambda: Spool(in_memory))
    inner = memory_grid({n: lambda m: trained(m.metadata.dst_node_id) for n in nodes})
    grid = plain_grid(inner, deadline=5)
    record = RecordDict({"arrays": as_record(model(0)), "config": ConfigRecord()})
    return grid, grid.send_and_receive([Message(record, node, "train") for node in nodes])


@pytest.mark.parametrize("in_memory", [0, 60_000, IN_MEMORY], ids=["disk", "both", "memory"])
def test_models_are_the_same_from_disk_and_from_memory(memory_grid, monkeypatch, in_memory):
    grid, replies = phase(memory_grid, monkeypatch, in_memory)
    on_disk = [isinstance(r.content["arrays"]["weight"], StoredArray) for r in replies]
    assert sum(on_disk) == {0: 3, 60_000: 2, IN_MEMORY: 0}[in_memory]
    for node, reply in zip((1, 2, 3), replies, strict=True):
        same(RecordArrays(sent_arrays(reply)), model(node))
    size = sum(record.count_bytes() for record in trained(1).values())
    assert grid.ledger.by_phase()["train"][UP] == 3 * size
    expected = weighted_mean((node, model(node)) for node in (1, 2, 3))
    sent = [RecordArrays(sent_arrays(reply)) for reply in replies]
    same(weighted_mean(enumerate(sent, start=1)), expected)
    arrays, _ = FedAvg().aggregate_train(1, replies)
    for name, array in arrays.items():
        np.testing.assert_allclose(
            array.numpy(), expected[name], atol=0.5 if name == "steps" else 1e-6
        )


def test_few_or_small_models_never_touch_the_disk(memory_grid, monkeypatch):
    def touched(*args, **kwargs):
        raise AssertionError

    monkeypatch.setattr(tempfile, "TemporaryFile", touched)
    phase(memory_grid, monkeypatch, IN_MEMORY)


@pytest.mark.skipif(sys.platform != "linux", reason="looks for the file in /proc")
def test_the_file_goes_away_with_the_last_of_its_models(memory_grid, monkeypatch):
    gc.collect()
    before = nameless_files()
    _, replies = phase(memory_grid, monkeypatch, 0)
    gc.collect()
    assert nameless_files() == before + 1
    last = replies[2].content["arrays"]["weight"]
    del replies
    gc.collect()
    np.testing.assert_array_equal(last.numpy(), model(3)["weight"])
    del last
    gc.collect()
    assert nameless_files() == before


def test_a_model_on_disk_can_be_sent_on(memory_grid, monkeypatch):
    _, replies = phase(memory_grid, monkeypatch, 0)
    objects = get_all_nested_objects(replies[1].content)
    received = inflate_object_from_contents(
        replies[1].content.object_id, {key: part.deflate() for key, part in objects.items()}
    )
    assert isinstance(received, RecordDict)
    same({name: array.numpy() for name, array in received["arrays"].items()}, model(2))


def test_a_full_disk_is_an_error_that_says_where_and_what_to_do(memory_grid, monkeypatch):
    with open("/dev/full", "w+b", buffering=0) as full:
        monkeypatch.setattr(tempfile, "TemporaryFile", lambda: full)
        with pytest.raises(SpoolError, match="No space left", check=at(tempfile.gettempdir())):
            phase(memory_grid, monkeypatch, 0)


class OneByOne:
    """Answers when it is looked for replies, one at a look, so that only the server keeps them."""

    def __init__(self, inner, size):
        self._inner, self._size = inner, size
        self._waiting = {}

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def push_messages(self, messages):
        ids = self._inner.push_messages(messages)
        self._waiting |= dict(zip(ids, messages, strict=True))
        return ids

    def pull_messages(self, message_ids):
        message = self._waiting.pop(min(message_ids, key=list(self._waiting).index))
        return [Message(trained(message.metadata.dst_node_id, self._size), reply_to=message)]


@pytest.mark.parametrize("strategy", [FedAvg, CheckedFedAvg])
def test_memory_does_not_grow_with_the_nodes(memory_grid, monkeypatch, strategy):
    def peak(nodes, size=20_000):  # 0.9 MB
        monkeypatch.setattr(transport, "Spool", lambda: Spool(2_000_000))
        monkeypatch.setattr(transport, "FIRST_POLL", 0.0)
        inner = memory_grid(dict.fromkeys(range(1, nodes + 1), lambda message: None))
        grid = plain_grid(OneByOne(inner, size), deadline=60)
        averaging, start = strategy(min_train_nodes=1, min_available_nodes=1), model(0, size)
        gc.collect()
        tracemalloc.start()
        messages = averaging.configure_train(1, as_record(start), ConfigRecord(), grid)
        arrays, _ = averaging.aggregate_train(1, grid.send_and_receive(messages))
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert arrays is not None
        return found

    assert peak(60) < 1.2 * peak(6)
