"""A cluster head's pool: what members sent is checked, kept and read in a fixed order."""

import logging
import os
import pickle

import pytest
import torch
from flwr.app import ConfigRecord, Context, RecordDict

from flwr_distill.client.session import Session
from flwr_distill.distill import VirtualData
from flwr_distill.links import introduce, send
from flwr_distill.links.records import VIRTUAL_DATA, Introduction
from flwr_distill.links.routes import Links
from flwr_distill.strategies.hfldd.client import keep_parcel, pooled_samples
from flwr_distill.strategies.hfldd.requests import ParcelBounds

RUN, HEAD, MEMBER = 1, 2**64 - 5, 2**64 - 6


def session_of(folder, node, partition):
    node_config = {"partition-id": partition, "num-partitions": 5, "state-dir": str(folder)}
    return Session.of(Context(RUN, node, node_config, RecordDict(), {}))


@pytest.fixture
def session(tmp_path):
    """The head's."""
    return session_of(tmp_path, HEAD, 0)


@pytest.fixture
def delivery(tmp_path, session):
    """Make what a member sent, as the server hands it to the head."""
    member = session_of(tmp_path, MEMBER, 1)
    links = Links(
        {s.node_id: Introduction.checked(introduce(s), "introduction") for s in (session, member)}
    )

    def sent(payload, purpose=VIRTUAL_DATA):
        route = links.route(MEMBER, HEAD, purpose)
        return links.forward(route, send(member, route, payload))

    return sent


def keep(session, rank, parcel, formation=1):
    bounds = ParcelBounds(images=5, of_a_class=5, formation=formation, server_round=1)
    return keep_parcel(session, rank, parcel, bounds)


def virtual(size=3, label=4, shape=(1, 8, 8), value=0.5, soft_labels=None, formation=1):
    data = VirtualData(
        images=torch.full((size, *shape), value),
        labels=torch.full((size,), label),
        method="test",
        steps=1,
        seed=0,
        init="noise",
        soft_labels=soft_labels,
        formation=formation,
    )
    return data.to_bytes()


def test_the_pool_is_the_own_data_and_then_the_parcels_by_rank(session, delivery):
    own = session.data.train
    assert pooled_samples(session) is own
    for rank, value in ((10, 2.0), (2, 1.0)):
        assert keep(session, rank, delivery(virtual(value=value)))
    pool = pooled_samples(session)
    assert torch.equal(pool.inputs[: len(own)], own.inputs)
    received = pool.inputs[len(own) :, 0, 0, 0]
    torch.testing.assert_close(received, torch.tensor([1.0] * 3 + [2.0] * 3), atol=0.01, rtol=0)
    assert pool.labels[len(own) :].tolist() == [4] * 6


def test_a_pool_holds_each_small_image_enlarged_with_the_label_of_all(session, delivery):
    learned = torch.eye(10)[[1, 2, 3]]
    payload = virtual(soft_labels=learned, formation=2)
    assert keep(session, 0, delivery(payload), formation=2)
    pool, own = pooled_samples(session), session.data.train
    assert torch.equal(pool.inputs[len(own) :], VirtualData.from_bytes(payload).decoded().images)
    assert torch.equal(pool.labels[len(own) :], learned.repeat_interleave(4, 0))


def test_a_parcel_sent_again_takes_the_place_of_the_first(session, delivery):
    keep(session, 0, delivery(virtual(label=1)))
    assert pooled_samples(session).labels[-1] == 1
    keep(session, 0, delivery(virtual(label=7, size=5)))
    assert pooled_samples(session).labels[-5:].tolist() == [7] * 5
    assert len(pooled_samples(session)) == len(session.data.train) + 5


class Bomb:
    def __reduce__(self):
        return os._exit, (13,)


@pytest.mark.parametrize(
    "broken",
    [
        b"not virtual data",
        virtual()[:-20],
        b"",
        virtual(label=10),
        virtual(shape=(3, 8, 8)),
        virtual(value=1e6),
        virtual(soft_labels=torch.full((3, 10), 7.0)),
        pickle.dumps(Bomb()),
        virtual(size=6),
        virtual(formation=2),
    ],
    ids=[
        "garbage",
        "truncated",
        "empty",
        "class-outside",
        "shape",
        "value",
        "labels",
        "pickle",
        "too-many",
        "formation",
    ],
)
def test_broken_data_are_set_aside_and_the_others_are_kept(session, delivery, broken, caplog):
    caplog.set_level(logging.WARNING, "flwr")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("flwr"), "propagate", True)
        assert not keep(session, 0, delivery(broken))
    assert f"Parcel from node {MEMBER} rejected: " in caplog.text
    assert keep(session, 1, delivery(virtual()))
    assert len(pooled_samples(session)) == len(session.data.train) + 3


def test_a_refused_parcel_is_set_aside_and_the_others_are_kept(session, delivery):
    first = delivery(virtual())
    assert keep(session, 0, first)
    assert not keep(session, 1, first)  # replayed
    assert not keep(session, 2, delivery(virtual(), purpose="something else"))
    assert not keep(session, 3, ConfigRecord())
    assert len(pooled_samples(session)) == len(session.data.train) + 3


def test_learned_labels_make_the_pool_s_labels_distributions(session, delivery):
    learned = torch.full((3, 10), 0.1)
    keep(session, 0, delivery(virtual(soft_labels=learned)))
    keep(session, 1, delivery(virtual(label=7)))
    pool, own = pooled_samples(session), session.data.train
    torch.testing.assert_close(pool.labels[len(own) : len(own) + 3], learned)
    hard = torch.cat([own.labels, torch.full((3,), 7)])
    kept = torch.cat([pool.labels[: len(own)], pool.labels[-3:]])
    assert torch.equal(kept, torch.eye(10)[hard])
