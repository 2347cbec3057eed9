"""A cluster head's pool: what members sent is checked, kept and read in a fixed order."""

import pytest
import torch
from flwr.app import ConfigRecord, Context, RecordDict

from client.pool import keep_parcel, pooled_samples
from client.session import Session
from distill import VirtualData


@pytest.fixture
def session(tmp_path):
    node_config = {"partition-id": 0, "num-partitions": 5, "state-dir": str(tmp_path)}
    return Session.of(Context(1, 2**64 - 5, node_config, RecordDict(), {}))


def parcel(size=3, label=4, shape=(1, 8, 8), value=0.5, **changes):
    virtual = VirtualData(
        images=torch.full((size, *shape), value),
        labels=torch.full((size,), label),
        method="test",
        steps=1,
        seed=0,
        init="noise",
    )
    return ConfigRecord({"payload": virtual.to_bytes(), "sender": "17", **changes})


def test_the_pool_is_the_own_data_and_then_the_parcels_by_rank(session):
    own = session.data.train
    assert pooled_samples(session) is own
    for rank, value in ((10, 2.0), (2, 1.0)):
        assert keep_parcel(session, rank, parcel(value=value))
    pool = pooled_samples(session)
    assert torch.equal(pool.inputs[: len(own)], own.inputs)
    received = pool.inputs[len(own) :, 0, 0, 0]
    torch.testing.assert_close(received, torch.tensor([1.0] * 3 + [2.0] * 3), atol=0.01, rtol=0)
    assert pool.labels[len(own) :].tolist() == [4] * 6


def test_a_parcel_sent_again_takes_the_place_of_the_first(session):
    keep_parcel(session, 0, parcel(label=1))
    assert pooled_samples(session).labels[-1] == 1
    keep_parcel(session, 0, parcel(label=7, size=5))
    assert pooled_samples(session).labels[-5:].tolist() == [7] * 5
    assert len(pooled_samples(session)) == len(session.data.train) + 5


@pytest.mark.parametrize(
    "broken",
    [
        parcel(payload=b"not virtual data"),
        parcel(payload=parcel()["payload"][:-20]),
        parcel(payload=5),
        parcel(label=10),
        parcel(shape=(3, 8, 8)),
        ConfigRecord({"sender": "17"}),
    ],
    ids=["garbage", "truncated", "no bytes", "class outside", "shape", "empty"],
)
def test_a_broken_parcel_is_set_aside_and_the_others_are_kept(session, broken):
    assert not keep_parcel(session, 0, broken)
    assert keep_parcel(session, 1, parcel())
    assert len(pooled_samples(session)) == len(session.data.train) + 3
