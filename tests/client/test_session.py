"""A node in a run: which data it trains on, and what its draws depend on."""

from itertools import count

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from PIL import Image

from flwr_distill.client.session import Session, held_out
from flwr_distill.client.training import epoch_batches
from flwr_distill.task.datasets import load_dataset
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.models import create_model
from flwr_distill.task.settings import (
    TaskSettings,
)
from flwr_distill.task.source import partition_samples
from tests.errors import at


@pytest.fixture
def session(tmp_path):
    def of(partition=0, node_id=7, run_id=1, own=(), **run_config):
        node_config = {"partition-id": partition, "num-partitions": 3, "state-dir": str(tmp_path)}
        node_config |= dict(own)
        return Session.of(Context(run_id, node_id, node_config, RecordDict(), run_config))

    return of


def drawn(generator):
    return tuple(torch.randperm(50, generator=generator).tolist())


def test_draws_differ_by_seed_node_purpose_and_round(session):
    generators = [
        session(partition, seed=seed).generator(purpose, server_round)
        for seed in (0, 1)
        for partition in (0, 1)
        for purpose in ("train", "refine")
        for server_round in (1, 2, 3)
    ]
    assert len({drawn(generator) for generator in generators}) == len(generators)


def test_draws_are_the_same_again_whatever_id_flower_gives_the_node_and_the_run(session):
    one, again = session(2, node_id=7, run_id=1), session(2, node_id=8, run_id=2)
    assert drawn(one.generator("train", 4)) == drawn(again.generator("train", 4))
    assert drawn(one.generator("train")) == drawn(again.generator("train"))


def test_minibatches_of_a_node_differ_between_its_rounds(session):
    mine, rounds = session(), set()
    for server_round in (1, 2, 3):
        draws = mine.generator("train", server_round)
        batches = epoch_batches(torch.zeros(40), 8, draws)
        rounds.add(tuple(tuple(batch.tolist()) for batch in batches))
    assert len(rounds) == 3


def test_a_node_that_is_asked_in_another_round_trains_in_another_order(client_grid):
    """Through the ClientApp: from one start, the model differs by round, and not by repetition."""
    grid = client_grid(1, {"train.local-epochs": 1})
    (node,) = grid.nodes
    start = ArrayRecord(create_model("auto", load_dataset("digits").spec, seed=0).state_dict())

    def trained(server_round):
        config = ConfigRecord({"server-round": server_round, "batch-size": 256})
        content = RecordDict({"arrays": start, "config": config})
        (reply,) = grid.send_and_receive([Message(content, node, "train")])
        arrays = reply.content["arrays"]
        return torch.cat([torch.tensor(array.numpy()).flatten() for array in arrays.values()])

    first, again, second = trained(1), trained(1), trained(2)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.35, 0.99])
def test_the_share_that_is_held_out_is_not_trained_on_and_nothing_is_lost(session, share):
    config = {"train.holdout": share}
    data = session(1, **config).data
    every = partition_samples(TaskSettings.from_run_config(config), 1, 3).to_samples(data.spec)
    assert len(data.holdout) == int(share * len(every))
    assert len(data.train) + len(data.holdout) == len(every)
    both = torch.cat([data.train.inputs, data.holdout.inputs]).flatten(1)
    assert sorted(both.tolist()) == sorted(every.inputs.flatten(1).tolist())


@pytest.mark.parametrize(
    ("share", "own", "where", "remedy"),
    [
        (0.0, {}, "train.holdout", "set it to 0.1"),
        (0.1, {}, "train.holdout", "raise it"),
        (0.1, {"holdout": 1e-9, "holdout-secret": "00"}, "the node's policy: holdout", "its owner"),
    ],
)
def test_a_node_that_holds_nothing_out_says_what_would_change_that(
    session, share, own, where, remedy
):
    """A tenth of nine samples is none, and to set it to 0.1 again would change nothing."""
    config = {"partition.max-of-a-class": 2, "partition.scheme": "iid", "train.holdout": share}
    nothing = session(**config, own=own)
    assert len(nothing.data.train) < 10
    with pytest.raises(SettingsError, check=at(where, value=own.get("holdout", share))) as error:
        held_out(nothing)
    assert error.value.remedy.startswith(remedy)


def test_the_same_samples_are_held_out_whatever_id_a_node_comes_back_with(session):
    ours, back = (session(1, node_id=node, run_id=node).data for node in (5, 6))
    assert torch.equal(ours.holdout.inputs, back.holdout.inputs)


def test_a_node_without_partition_draws_by_its_id(tmp_path):
    told = {"dataset": "digits", "state-dir": str(tmp_path), "device": "cpu"}
    run_config = {"dataset": "private", "private.shape": "1x8x8"}
    first, second = (
        Session.of(Context(1, node, told, RecordDict(), run_config)) for node in (2**63 + 1, 4)
    )
    assert (first.identity, second.identity) == (2**63 + 1, 4)
    assert drawn(first.generator("x")) != drawn(second.generator("x"))


@pytest.mark.parametrize(
    ("run_config", "missing", "complaint"),
    [
        ({}, "partition-id", "neither data nor partition-id and num-partitions"),
        ({}, "num-partitions", "neither data nor partition-id and num-partitions"),
        ({"dataset": "private"}, "", "every node brings its own"),
    ],
)
def test_a_node_without_data_is_told_how_to_have_some(tmp_path, run_config, missing, complaint):
    told = {"partition-id": 0, "num-partitions": 7, "state-dir": str(tmp_path), "device": "cpu"}
    told.pop(missing, None)
    with pytest.raises(SettingsError, match=complaint):
        Session.of(Context(1, 5, told, RecordDict(), run_config))


def test_classes_of_fewer_samples_than_the_nodes_owner_demands_are_left_out(tmp_path):
    def labels(fewest):
        node = {"partition-id": 0, "num-partitions": 7, "state-dir": str(tmp_path), **fewest}
        config = {"partition.scheme": "dirichlet", "partition.alpha": 0.1, "train.holdout": 0.0}
        return Session.of(Context(1, 5, node, RecordDict(), config)).data.train.labels

    sizes = labels({}).bincount()
    fewest = int(sizes.max())
    assert int((sizes < fewest).sum()) > 0
    assert (sizes[labels({"fewest-of-a-class": fewest}).unique()] >= fewest).all()
    assert len(labels({"fewest-of-a-class": fewest})) == int(sizes[sizes >= fewest].sum())
    with pytest.raises(SettingsError, match=f"fewest-of-a-class = {fewest + 1}"):
        labels({"fewest-of-a-class": fewest + 1})


def test_a_node_uses_the_classes_that_its_owner_names_however_many_samples_they_have(tmp_path):
    runs = count(1)

    def labels(data, **run_config):
        node = {"data": str(data), "state-dir": str(tmp_path), "classes": "cat,7"}
        config = {"dataset": "private", "private.shape": "1x4x4", "train.holdout": 0.0}
        config |= {f"private.{key}": value for key, value in run_config.items()}
        context = Context(next(runs), 5, node, RecordDict(), config)
        return Session.of(context).data.train.labels.tolist()

    grey = np.zeros((3, 4, 4), np.uint8)
    np.savez(tmp_path / "own.npz", images=grey, labels=[7, 3, 3])
    assert labels(tmp_path / "own.npz") == [7]
    for name in ("cat", "dog", "7"):
        (tmp_path / "folder" / name).mkdir(parents=True)
        Image.fromarray(grey[0]).save(tmp_path / "folder" / name / "a.png")
    assert sorted(labels(tmp_path / "folder", classes="dog,cat,7,3")) == [1, 2]
    np.savez(tmp_path / "other.npz", images=grey, labels=[1, 3, 3])
    with pytest.raises(SettingsError, match="classes = cat,7"):
        labels(tmp_path / "other.npz")
