"""FedHEAD's leaders screen what their members send, which the server cannot see."""

import json

import numpy as np
import pytest
from flwr.app import ConfigRecord
from safetensors.numpy import load, save

import flwr_distill.strategies.fedhead.client
from flwr_distill.server.record.journal import Journal
from flwr_distill.strategies.fedhead import FedHEAD
from flwr_distill.strategies.fedhead.method import DISTILL_SECTOR
from tests.grids import screening_grid

from .rounds import MODEL, assert_equal, numbers, start

NODES = 6
RUN_CONFIG = {"partition.scheme": "iid", "train.local-epochs": 1, "train.batch-size": 64}
START = {name: value.numpy() for name, value in MODEL.state_dict().items()}


def longer(factor):
    """What a member sends in place of what it trained."""

    def spoil(payload):
        trained = load(payload)
        return save({n: (w + factor * (trained[n] - w)).astype(w.dtype) for n, w in START.items()})

    return spoil


def away(payload):
    raise RuntimeError("this node is broken")


@pytest.fixture
def mean_of_a_round(client_grid, monkeypatch, tmp_path):
    """Mean of a sector of six in the first round, where two members spoil what they send."""
    send = flwr_distill.strategies.fedhead.client.send

    def play(spoil, **run_config):
        def without_distillation(node, message):
            return message.metadata.message_type == DISTILL_SECTOR

        journal = Journal(tmp_path / "journal.jsonl")
        nodes = client_grid(NODES, {**RUN_CONFIG, **run_config}, without_distillation)
        grid = screening_grid(nodes, deadline=60, journal=journal)
        strategy = FedHEAD(
            sectors=1, fixed_leader=True, norm_threshold=run_config.get("norm-threshold", 5.0)
        )
        messages = list(strategy.configure_train(1, start(), ConfigRecord({"lr": 0.05}), grid))
        (cluster,) = strategy.topology.clusters

        def spoiled(session, route, payload, deadline):
            hostile = session.node_id in cluster.members[:2]
            return send(session, route, spoil(payload) if hostile else payload)

        monkeypatch.setattr(flwr_distill.strategies.fedhead.client, "send", spoiled)
        arrays, _ = strategy.aggregate_train(1, grid.send_and_receive(messages))
        entries = map(json.loads, (tmp_path / "journal.jsonl").read_text().splitlines())
        booked = [entry for entry in entries if "set_aside" in entry]
        assert journal.set_aside == len(booked)
        return numbers(arrays), booked, cluster

    return play


@pytest.mark.parametrize("spoil", [longer(1000), longer(np.nan), lambda payload: b"\x80\x04N."])
def test_the_sectors_mean_is_that_of_the_others(mean_of_a_round, spoil):
    found, booked, cluster = mean_of_a_round(spoil)
    assert {entry["set_aside"] for entry in booked} == {str(node) for node in cluster.members[:2]}
    for entry in booked:
        assert entry["reply_to"] == "train.sector"
        assert entry["reason"].startswith(f"leader {cluster.head} rejects it: ")
    expected, booked, _ = mean_of_a_round(away)
    assert booked == []
    assert_equal(found, expected)


def test_a_norm_threshold_of_0_is_the_leaders_too(mean_of_a_round):
    found, booked, _ = mean_of_a_round(longer(1000), **{"norm-threshold": 0.0})
    assert booked == []
    assert max(np.abs(array - START[name]).max() for name, array in found.items()) > 1
