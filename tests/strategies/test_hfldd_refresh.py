"""HFLDD's members refine their virtual data in the federation; real ClientApp, grid in memory."""

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict

from flwr_distill.client.session import Session
from flwr_distill.client.terms import extractor
from flwr_distill.distill import VirtualData
from flwr_distill.distill.distribution_matching import distill_dm
from flwr_distill.storage.store import NodeStore
from flwr_distill.strategies.common.traffic import BITS_PER_FLOAT
from flwr_distill.strategies.hfldd import HFLDD
from flwr_distill.strategies.hfldd.client import PREFIX, REFINED
from flwr_distill.strategies.hfldd.clusters import LiveCluster
from flwr_distill.strategies.hfldd.distillation import REFINE_BANK
from flwr_distill.strategies.hfldd.method import DISTILL, NUM_PARCELS, HFLDDSettings
from flwr_distill.strategies.hfldd.traffic import hfldd_bits
from flwr_distill.task.datasets import load_dataset
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.models import create_model

NODES, STEPS, FIRST_RUN = 4, 2, 1
RUN_CONFIG = {"partition.classes": 2, "train.local-epochs": 1}


class Federation:
    """HFLDD that refreshes every second round; messages for which `fails` is true get lost."""

    def __init__(self, client_grid, folder):
        model = create_model("auto", load_dataset("digits").spec, seed=0)
        self.arrays, self.folder = ArrayRecord(model.state_dict()), folder
        self.fails = lambda message: False
        self.grid = client_grid(NODES, RUN_CONFIG, lambda _, message: self.fails(message))
        self.asked = []
        self.strategy = HFLDD(
            groups=NODES,  # one cluster
            links="relay",
            refresh_every=2,
            refresh_steps=STEPS,
            distilled_size=4,
            distiller="dm",
            distill_steps=1,
            rotate=False,
        )

    def run(self, server_round):
        """Give the number of parcels that the head trained on."""
        before = len(self.grid.pushed)
        config = ConfigRecord({"lr": 0.05})
        messages = self.strategy.configure_train(server_round, self.arrays, config, self.grid)
        replies = self.grid.send_and_receive(list(messages))
        pushed = self.grid.pushed[before:]
        self.asked = [m for m in pushed if m.metadata.message_type == DISTILL]
        self.arrays, _ = self.strategy.aggregate_train(server_round, replies)
        return [reply.content["metrics"][NUM_PARCELS] for reply in replies]

    @property
    def head(self):
        return self.strategy.topology.clusters[0].head

    @property
    def members(self):
        return self.strategy.topology.clusters[0].members

    def session(self, node):
        return Session.of(
            Context(
                FIRST_RUN,
                node,
                {
                    "partition-id": list(self.grid.nodes).index(node),
                    "num-partitions": NODES,
                    "state-dir": str(self.folder),
                },
                RecordDict(),
                RUN_CONFIG,
            )
        )

    def held(self, node):
        """What the head holds of a node."""
        (cluster,) = self.strategy._clusters
        rank = cluster.nodes.index(node)
        return self.session(cluster.head).store.read(f"{PREFIX}{rank:06d}")


@pytest.fixture
def federation(client_grid, tmp_path):
    return Federation(client_grid, tmp_path / "state")


def test_members_refine_with_the_rounds_model_and_heads_train_on_what_they_send(federation):
    federation.run(1)
    first = {node: federation.held(node) for node in federation.members}
    federation.run(2)
    assert not federation.asked
    model = create_model("auto", load_dataset("digits").spec, seed=1)
    model.load_state_dict(federation.arrays.to_torch_state_dict())
    assert federation.run(3) == [NODES - 1]
    assert {m.metadata.dst_node_id for m in federation.asked} == set(federation.members)
    for node, before in first.items():
        session = federation.session(node)
        expected = distill_dm(
            session.data.train.inputs,
            session.data.train.labels,
            num_classes=10,
            per_class=2,
            steps=STEPS,
            generator=session.generator("refine", 3),
            network=extractor(model),
            bank=REFINE_BANK,
            initial_images=VirtualData.from_bytes(before).images,
        )
        after = VirtualData.from_bytes(federation.held(node))
        expected = VirtualData.from_bytes(expected.to_bytes(bits=4))
        assert torch.equal(after.images, expected.images)
        assert torch.equal(after.labels, expected.labels)


def test_a_later_head_gets_the_refined_data_without_another_refinement(federation):
    for server_round in (1, 2, 3):
        federation.run(server_round)
    left, refined = federation.members, {node: federation.held(node) for node in federation.members}
    del federation.grid.nodes[federation.head]
    assert federation.run(4) == [len(left) - 1]
    assert not any("refinement" in message.content for message in federation.asked)
    for node in set(left) - {federation.head}:
        assert federation.held(node) == refined[node]


def test_a_former_head_that_leads_again_gets_what_was_refined_meanwhile(federation):
    federation.run(1)
    former = federation.head
    (cluster,) = federation.strategy._clusters
    cluster.head = federation.members[0]
    federation.run(3)
    refined = {node: federation.held(node) for node in federation.members if node != former}
    cluster.head = former
    assert federation.run(4) == [NODES - 1]
    assert {node: federation.held(node) for node in refined} == refined


def test_a_refinement_that_fails_leaves_the_head_what_it_had(federation):
    federation.run(1)
    first = {node: federation.held(node) for node in federation.members}
    lost, *others = federation.members

    def fails(message):
        return message.metadata.message_type == DISTILL and message.metadata.dst_node_id == lost

    federation.fails = fails
    assert federation.run(3) == [NODES - 1]
    assert federation.held(lost) == first[lost]
    assert all(federation.held(node) != first[node] for node in others)
    federation.fails = lambda message: False
    federation.run(5)
    assert federation.held(lost) != first[lost]


def test_a_resumed_run_takes_up_the_virtual_data_of_its_checkpoint(federation, tmp_path):
    federation.run(1)
    kept = [federation.held(federation.members[0])]
    federation.run(3)
    kept.append(federation.held(federation.members[0]))
    for server_round, expected in ((2, kept[0]), (3, kept[1])):
        store = NodeStore(tmp_path / "state" / "runs" / f"9{server_round}" / "7")
        store.take_over(str(FIRST_RUN), str(federation.head), server_round)
        (cluster,) = federation.strategy._clusters
        rank = cluster.nodes.index(federation.members[0])
        assert store.read(f"{PREFIX}{rank:06d}") == expected


def test_models_that_members_refine_with_count_in_the_formula(federation):
    for server_round in (1, 2, 3):
        federation.run(server_round)
    members, weights = len(federation.members), 1000
    bits = federation.strategy.expected_bits(weights, 3)
    strategy = federation.strategy
    plain = hfldd_bits(
        num_clients=NODES,
        num_auxiliary=strategy.settings.auxiliary_size,
        num_classes=10,
        distilled_values=strategy._exchange.distilled_values,
        bits_per_value=4,
        num_heads=1,
        num_weights=weights,
        num_rounds=3,
    )
    assert strategy._exchange.distilled_values == 2 * members * 4 * 64
    assert bits - plain == members * weights * BITS_PER_FLOAT
    copy = HFLDD()
    copy.load_state_dict(strategy.state_dict())
    assert copy.expected_bits(weights, 3) == bits


def test_refined_data_are_judged_anew_but_who_was_voted_out_stays_out():
    cluster = LiveCluster([1, 2, 3, 4], head=1, held={1: [2, 3]}, verdicts={1: {2: True, 3: False}})
    cluster.received([2, 3, 4])
    assert cluster.held_by_head == [2, 3, 4]
    assert cluster.left_out == [2]
    assert cluster.undecided == [3, 4]


@pytest.mark.parametrize(
    "other",
    [
        {"share-raw-data": True},
        {"dp-epsilon": 1.0, "start": "noise", "distiller": "dm"},
    ],
    ids=["raw data", "differential privacy"],
)
def test_what_cannot_be_refined_is_refused_by_name(other):
    with pytest.raises(SettingsError, match="refresh-every"):
        HFLDDSettings.checked({"refresh-every": 5, **other}, "hfldd")


def test_a_node_refuses_to_refine_without_the_privacy_that_is_asked_for(federation):
    federation.run(1)
    member = federation.members[0]
    before = federation.held(member)
    private = {"start": "noise", "dp_epsilon": 5.0}  # without the check: the node is on its own
    exchange = federation.strategy._exchange
    exchange.settings = exchange.settings.model_copy(update=private)
    federation.run(3)
    assert federation.asked
    assert federation.held(member) == before
    assert federation.session(member).store.read(REFINED) is None
