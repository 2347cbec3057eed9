"""HFLDD continues as nodes are lost, fail, come back and join; real ClientApp, grid in memory."""

import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, RecordDict

from flwr_distill.client.app import app
from flwr_distill.distill import VirtualData
from flwr_distill.strategies.common.directory import Directory
from flwr_distill.strategies.common.retries import Retries
from flwr_distill.strategies.hfldd import HFLDD
from flwr_distill.strategies.hfldd.clusters import Clusters
from flwr_distill.strategies.hfldd.method import (
    DISTILL,
    KEPT_PARCELS,
    LABEL_KNOWLEDGE,
    NUM_PARCELS,
    RECEIVE,
    TRAIN_POOL,
)

from .rounds import FIRST, assert_equal, spoil, start

RUN_CONFIG = {"partition.classes": 2, "train.local-epochs": 1}
PER_NODE = 6


@pytest.fixture
def distillations(monkeypatch):
    """Count how often nodes distil; what they make is quick."""
    count = Counter()

    def distil(images, labels, *, generator, **_):
        count["distilled"] += 1
        pixels = torch.rand(PER_NODE, 1, 8, 8, generator=generator)
        drawn = labels[:1].expand(PER_NODE).clone()
        return VirtualData(pixels, drawn, method="dm", steps=1, seed=0, init="noise")

    monkeypatch.setattr("flwr_distill.distill.many.distiller", lambda name: distil)
    return count


class Federation:
    """A strategy and its nodes, round after round; nodes are named by their place."""

    def __init__(self, grid, **settings):
        self.grid, self.arrays = grid, start()
        self.everyone = dict(grid.nodes)
        self.ids = list(grid.nodes)
        quick = {"distilled_size": PER_NODE, "distiller": "dm", "distill_steps": 1}
        settings = {"groups": 3, "rotate": False, **quick, **settings}
        self.strategy = HFLDD(links="relay", **settings)
        self.round = 0
        self.asked = Counter()

    def run(self):
        """One round; give the replies to training by node."""
        self.round += 1
        before = len(self.grid.pushed)
        config = ConfigRecord({"lr": 0.05})
        messages = self.strategy.configure_train(self.round, self.arrays, config, self.grid)
        replies = self.grid.send_and_receive(list(messages))
        self.asked = Counter(m.metadata.message_type for m in self.grid.pushed[before:])
        arrays, _ = self.strategy.aggregate_train(self.round, replies)
        self.arrays = arrays or self.arrays
        return {r.metadata.src_node_id: r for r in replies if r.has_content()}

    def cluster_of(self, node):
        clusters = self.strategy.topology.clusters
        return next(c for c in clusters if node in (c.head, *c.members))

    def largest(self):
        return max(self.strategy.topology.clusters, key=lambda c: len(c.members))

    def lose(self, node):
        del self.grid.nodes[node]

    def bring_back(self, node):
        self.grid.nodes[node] = self.everyone[node]

    def parcels(self, replies, head):
        return replies[head].content["metrics"][NUM_PARCELS]


@pytest.fixture
def federation(client_grid, distillations):
    return Federation(client_grid(6, RUN_CONFIG))


def test_a_lost_heads_place_is_taken_and_its_members_send_again_without_distilling_anew(
    federation, distillations
):
    federation.run()
    lost, num_clusters = federation.largest(), len(federation.strategy.topology.clusters)
    assert len(lost.members) > 1
    assert distillations["distilled"] == 6 - num_clusters
    federation.lose(lost.head)
    replies = federation.run()
    heir = federation.cluster_of(lost.members[0]).head
    assert heir in lost.members
    assert federation.parcels(replies, heir) == len(lost.members) - 1
    assert distillations["distilled"] == 6 - num_clusters
    assert federation.asked[DISTILL] == len(lost.members) - 1
    assert len(replies) == num_clusters


def test_a_head_that_is_back_is_a_member_and_sends_its_data(federation):
    federation.run()
    lost = federation.largest()
    federation.lose(lost.head)
    federation.run()
    federation.bring_back(lost.head)
    replies = federation.run()
    now = federation.cluster_of(lost.head)
    assert now.head != lost.head
    assert federation.parcels(replies, now.head) == len(lost.members)
    assert federation.asked[DISTILL] == 1
    federation.run()
    assert federation.asked[DISTILL] == 0


def test_a_head_that_fails_to_train_is_replaced_in_the_next_round(federation):
    federation.run()
    lost = federation.largest()
    head, honest = lost.head, federation.everyone[lost.head]

    def failing(message):
        if message.metadata.message_type == TRAIN_POOL:
            raise RuntimeError("out of memory")
        return honest(message)

    federation.grid.nodes[head] = failing
    assert set(federation.run()) == set(federation.strategy.topology.heads) - {head}
    replies = federation.run()
    heir = federation.cluster_of(head).head
    assert heir != head
    assert federation.parcels(replies, heir) == len(lost.members)


def test_heads_take_turns_and_each_gets_the_virtual_data_once(client_grid, distillations):
    federation = Federation(client_grid(6, RUN_CONFIG), rotate=True)
    cluster_of, heads = {}, Counter()
    for _ in range(12):
        replies = federation.run()
        for cluster in federation.strategy.topology.clusters:
            cluster_of |= dict.fromkeys((cluster.head, *cluster.members), len(cluster.members))
            assert federation.parcels(replies, cluster.head) == len(cluster.members)
        heads.update(list(replies))
    assert heads.keys() == set(federation.ids)
    sent = sum(m.metadata.message_type == DISTILL for m in federation.grid.pushed)
    assert sent == sum(cluster_of.values())
    assert distillations["distilled"] == sum(others > 0 for others in cluster_of.values())


def one_cluster(failures=()):
    """Five nodes that all differ, of which some have failed as heads."""
    clusters = Clusters(seed=0)
    clusters.form({node: np.eye(5)[[node]] for node in range(5)}, groups=5)
    clusters.load_state_dict(
        {**clusters.state_dict(), "failures": {node: [3, 2 + 8] for node in failures}}
    )
    return clusters


def heads_of(clusters, rounds, samples, connected=frozenset(range(5))):
    heads = Counter()
    for server_round in range(2, rounds + 2):
        clusters.rotate_heads(server_round, connected, samples)
        heads.update(cluster.head for cluster in clusters)
    return heads


def test_a_node_is_head_as_often_as_it_has_samples():
    samples = {0: 10, 1: 20, 2: 30, 3: 40}  # the fifth does not say, and counts as one
    heads = heads_of(one_cluster(), 101, samples)
    for node, count in samples.items():
        assert abs(heads[node] - count) <= 2
    assert heads[4] <= 2


@pytest.mark.parametrize(
    ("failures", "failed", "connected"),
    [((1,), set(), range(5)), ((), {1}, range(5)), ((), set(), (0, 2, 3, 4))],
    ids=["failed before", "failed now", "not connected"],
)
def test_a_node_that_failed_or_is_away_has_no_turn(failures, failed, connected):
    clusters = one_cluster(failures)
    clusters.failed = failed
    heads = heads_of(clusters, 8, dict.fromkeys(range(5), 10), set(connected))
    assert heads.keys() == {0, 2, 3, 4}


def test_a_head_that_failed_once_has_its_turns_again():
    """A late reply must not keep a node's own data from being trained on for the rest of a run."""
    clusters, everyone = one_cluster(), set(range(5))
    samples = dict.fromkeys(everyone, 10)
    heads = Counter()
    for server_round in range(2, 52):
        clusters.rotate_heads(server_round, everyone, samples)
        clusters.replace_heads(server_round, everyone)
        (cluster,) = clusters
        heads[cluster.head] += 1
        clusters.failed = {cluster.head} if server_round == 7 else set()
    assert heads.keys() == everyone
    assert min(heads.values()) >= 8


def test_heads_of_different_clusters_have_different_data_at_a_time():
    clusters = Clusters(seed=0)
    clusters.form({node: np.eye(5)[[node % 5]] for node in range(25)}, groups=5)
    clusters.rotate_heads(2, set(range(25)), dict.fromkeys(range(25), 10))
    assert {cluster.head % 5 for cluster in clusters} == set(range(5))


@pytest.mark.parametrize("failing_often", [(), (2,), (1, 3)])
def test_the_member_that_failed_least_as_head_takes_over(failing_often):
    """Heads fail round after round, some of them for the second time."""
    clusters, failures = one_cluster(failing_often), Counter(dict.fromkeys(failing_often, 3))
    (cluster,) = clusters
    heads = []
    for server_round in range(2, 22):
        heads.append(cluster.head)
        failures[cluster.head] += 1
        clusters.failed = {cluster.head}
        clusters.replace_heads(server_round, connected=set(range(5)))
        others = [failures[node] for node in range(5) if node != heads[-1]]
        assert cluster.head != heads[-1]
        assert failures[cluster.head] == min(others)
    assert set(heads) == set(range(5))


def test_a_member_that_is_not_connected_does_not_take_over_however_reliable():
    clusters = Clusters(seed=0)
    clusters.form({node: np.eye(3)[[node]] for node in range(3)}, groups=3)
    (cluster,) = clusters
    first, away, there = cluster.head, *(node for node in range(3) if node != cluster.head)
    clusters.load_state_dict(
        {**clusters.state_dict(), "failures": {there: [9, 99]}, "failed": [first]}
    )
    clusters.replace_heads(2, connected={first, there})
    assert [cluster.head for cluster in clusters] == [there]
    assert away not in clusters.by_head()


def test_a_member_lost_before_it_sent_completes_its_cluster_once_it_is_back(
    client_grid, distillations
):
    rehearsal = Federation(client_grid(6, RUN_CONFIG))
    rehearsal.run()
    whole = rehearsal.largest()
    missing = whole.members[0]
    federation = Federation(client_grid(6, RUN_CONFIG))
    honest = federation.everyone[missing]

    def dying(message):
        if message.metadata.message_type == DISTILL:
            federation.lose(missing)
            return None
        return honest(message)

    federation.grid.nodes[missing] = dying
    num_members = len(whole.members)
    assert federation.parcels(federation.run(), whole.head) == num_members - 1
    assert federation.parcels(federation.run(), whole.head) == num_members - 1
    federation.bring_back(missing)
    assert federation.parcels(federation.run(), whole.head) == num_members


def test_a_new_node_joins_the_cluster_that_lacks_its_like(client_grid, distillations):
    grid = client_grid(20, {**RUN_CONFIG, "partition.classes": 1})
    late = list(grid.nodes)[7]
    everyone = dict(grid.nodes)
    del grid.nodes[late]
    federation = Federation(grid, groups=10)
    federation.run()
    smaller = min(federation.strategy.topology.clusters, key=lambda c: len(c.members))
    assert len(smaller.members) == 8
    grid.nodes[late] = everyone[late]
    replies = federation.run()
    joined = federation.cluster_of(late)
    assert joined.head == smaller.head
    assert federation.asked[LABEL_KNOWLEDGE] == 1
    assert federation.parcels(replies, joined.head) == 9
    twin = next(group for group in federation.strategy.topology.groups if late in group)
    assert len(twin) == 2  # 20 nodes of one digit each: the other node of the same digit
    federation.run()
    assert federation.asked[LABEL_KNOWLEDGE] == federation.asked[DISTILL] == 0


def test_virtual_data_that_a_head_has_lost_are_sent_again(federation, tmp_path):
    federation.run()
    cluster = federation.largest()
    shutil.rmtree(next((tmp_path / "state" / "runs").glob(f"*/{cluster.head}")))
    assert federation.parcels(federation.run(), cluster.head) == 0
    assert federation.parcels(federation.run(), cluster.head) == len(cluster.members)


def test_a_member_that_has_lost_its_key_with_all_else_is_asked_anew_who_it_is(federation, tmp_path):
    """Its new head refuses what it seals by another key; the next time the server knows better."""
    federation.run()
    lost = federation.largest()
    federation.lose(lost.head)
    for member in lost.members:
        shutil.rmtree(next((tmp_path / "state" / "runs").glob(f"*/{member}")))
    federation.run()
    replies = federation.run()
    heir = federation.cluster_of(lost.members[0]).head
    assert federation.parcels(replies, heir) == len(lost.members) - 1


@pytest.mark.parametrize("is_head", [False, True])
def test_a_node_that_is_back_under_another_id_takes_its_place(federation, is_head, tmp_path):
    """A SuperNode without a key file is another node to the SuperLink when it starts again."""
    federation.run()
    cluster = federation.largest()
    lost = cluster.head if is_head else cluster.members[0]
    place, new = federation.ids.index(lost), FIRST + 99
    config = {"partition-id": place, "num-partitions": 6, "state-dir": str(tmp_path / "state")}
    context = Context(1, new, {**config, "device": "cpu"}, RecordDict(), RUN_CONFIG)
    federation.lose(lost)
    federation.grid.nodes[new] = lambda message: app(message, context).content
    replies = federation.run()
    now = federation.cluster_of(new)
    assert {now.head, *now.members} == {cluster.head, *cluster.members} - {lost} | {new}
    assert (now.head == new) == is_head
    assert federation.parcels(replies, now.head) == len(cluster.members)
    assert federation.asked[DISTILL] == (len(cluster.members) if is_head else 0)


def test_a_cluster_that_is_all_gone_is_left_out_and_joins_again(federation):
    federation.run()
    gone, num_clusters = federation.largest(), len(federation.strategy.topology.clusters)
    for node in (gone.head, *gone.members):
        federation.lose(node)
    assert len(federation.run()) == num_clusters - 1
    for node in (gone.head, *gone.members):
        federation.bring_back(node)
    assert federation.parcels(federation.run(), gone.head) == len(gone.members)


def test_a_round_without_any_head_leaves_the_model(federation):
    federation.run()
    before = federation.arrays
    federation.grid.nodes.clear()
    assert federation.run() == {}
    assert federation.arrays is before


def test_a_node_that_never_answers_is_asked_ever_more_rarely(federation):
    honest = federation.everyone[federation.ids[0]]

    def mute(message):
        if message.metadata.message_type == LABEL_KNOWLEDGE:
            raise RuntimeError("never")
        return honest(message)

    federation.grid.nodes[federation.ids[0]] = mute
    asked = []
    for _ in range(8):
        federation.run()
        asked.append(federation.asked[LABEL_KNOWLEDGE])
    assert asked == [6, 1, 1, 0, 1, 0, 0, 0]


def test_retries_wait_for_one_two_four_and_eight_rounds_and_survive_a_restart():
    retries, asked = Retries(), []
    for server_round in range(1, 33):
        retries = Retries(retries.state_dict())
        if retries.due(7, server_round):
            asked.append(server_round)
            retries.failed(7, server_round)
    assert asked == [1, 2, 4, 8, 16, 32]


def test_a_strategy_that_goes_on_from_its_state_fails_over_alike(client_grid, distillations):
    models = []
    for restarted in (False, True):
        federation = Federation(client_grid(6, RUN_CONFIG))
        federation.run()
        federation.lose(federation.largest().head)
        federation.run()
        if restarted:
            state = federation.strategy.state_dict()
            federation.strategy = Federation(federation.grid).strategy
            federation.strategy.load_state_dict(state)
        federation.bring_back(next(iter(federation.everyone.keys() - federation.grid.nodes)))
        federation.run()
        models.append(federation.arrays)
    assert_equal(*models, atol=0)


def test_a_head_that_claims_to_have_lost_its_data_again_and_again_is_replaced(federation):
    federation.run()
    cluster = federation.largest()

    def forget(content):
        content["metrics"][NUM_PARCELS] = 0

    spoil(federation.grid, cluster.head, forget, TRAIN_POOL)
    federation.run()
    assert federation.cluster_of(cluster.head).head == cluster.head
    federation.run()
    federation.run()
    assert federation.cluster_of(cluster.head).head != cluster.head
    federation.run()
    assert federation.asked[DISTILL] == 0


@pytest.fixture
def all_heads(client_grid, distillations):
    return Federation(client_grid(6, RUN_CONFIG), heads="all", num_rounds=8)


def test_where_all_train_each_node_distils_once_and_gets_the_others_data_once(
    all_heads, distillations
):
    replies = all_heads.run()
    sizes = [len(cluster) for cluster in all_heads.strategy.topology.clusters]
    assert set(replies) == set(all_heads.ids)
    for cluster in all_heads.strategy.topology.clusters:
        assert {all_heads.parcels(replies, node) for node in cluster} == {len(cluster) - 1}
    assert distillations["distilled"] == sum(size for size in sizes if size > 1)
    all_heads.run()
    assert all_heads.asked[DISTILL] == 0


def test_where_all_train_virtual_data_fade_to_none_over_half_of_the_rounds(all_heads):
    counts = [
        sum(reply.content["metrics"]["num-examples"] for reply in all_heads.run().values())
        for _ in range(6)
    ]
    received = sum(len(c) * (len(c) - 1) for c in all_heads.strategy.topology.clusters) * PER_NODE
    assert np.diff(counts).tolist() == pytest.approx([-received / 4] * 4 + [0], abs=6)
    assert counts[-1] == counts[0] - received


def test_where_all_train_no_more_do_than_fraction_train_says(client_grid, distillations):
    federation = Federation(
        client_grid(6, RUN_CONFIG), heads="all", num_rounds=8, fraction_train=0.5
    )
    replies = federation.run()
    assert len(replies) == 3
    assert federation.asked[TRAIN_POOL] == 3
    held = [node for cluster in federation.strategy._clusters for node in cluster.held]
    assert set(held) <= set(replies)


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("place", [0, 2])
def test_where_all_train_a_node_that_refuses_virtual_data_costs_the_others_nothing(
    all_heads, kept, place
):
    def refuse(content):
        ranks = content["metrics"][KEPT_PARCELS]
        content["metrics"][KEPT_PARCELS] = list(ranks)[:kept]

    refusing = all_heads.ids[place]
    spoil(all_heads.grid, refusing, refuse, RECEIVE)
    replies = all_heads.run()
    cluster = next(c for c in all_heads.strategy.topology.clusters if refusing in c)
    for node in set(cluster) - {refusing}:
        assert all_heads.parcels(replies, node) == len(cluster) - 1


def test_where_all_train_a_node_counts_for_no_more_virtual_samples_than_it_was_to_draw(all_heads):
    liar = all_heads.ids[0]

    def claim(content):
        content["metrics"]["num-examples"] = 10**9

    spoil(all_heads.grid, liar, claim, TRAIN_POOL)
    for _ in range(5):
        replies = all_heads.run()
    own = all_heads.strategy._directory.samples(all_heads.ids)[liar]
    assert all_heads.strategy.read(replies[liar]).num_examples == own


@pytest.fixture
def with_liars(client_grid, distillations):
    """Two honest nodes and a liar, and what they sent to each other and to three that are gone."""

    def federation(**settings):
        made = Federation(client_grid(6, RUN_CONFIG), **settings)
        made.run()
        liar, *honest = made.ids[:3]
        claims = made.strategy._directory.num_examples
        claims |= dict.fromkeys({*made.ids} - {*honest}, 10**9)
        for gone in made.ids[3:]:
            made.lose(gone)
        return made, liar

    return federation


@pytest.mark.parametrize("raw", [False, True])
def test_nodes_that_are_gone_do_not_raise_what_a_head_may_claim(with_liars, raw):
    """Else a node that signs on again and again would move the median with claims alone."""
    federation, liar = with_liars(heads="all", share_raw_data=raw)

    def claim(content):
        content["metrics"]["num-examples"] = 10**9

    spoil(federation.grid, liar, claim, TRAIN_POOL)
    replies = federation.run()
    assert federation.strategy.read(replies[liar]).num_examples < 10**5


def test_nodes_that_are_gone_do_not_have_a_liar_lead_in_each_round(with_liars):
    federation, liar = with_liars(groups=6, rotate=True)
    assert len(federation.strategy.topology.clusters) == 1
    heads = [*federation.run(), *federation.run(), *federation.run()]
    assert heads.count(liar) < len(heads)


def test_what_nodes_count_for_is_worked_out_once_a_round_however_many_train(all_heads, monkeypatch):
    counted, samples = [], Directory.samples

    def counting(directory, nodes):
        counted.append(nodes)
        return samples(directory, nodes)

    monkeypatch.setattr(Directory, "samples", counting)
    assert len(all_heads.run()) == 6
    assert len(counted) == 1


def test_where_all_train_a_run_resumed_for_longer_fades_as_it_began(all_heads):
    for _ in range(5):
        all_heads.run()
    state = all_heads.strategy.state_dict()
    all_heads.strategy = Federation(all_heads.grid, heads="all", num_rounds=80).strategy
    all_heads.strategy.load_state_dict(state)
    sent = all_heads.strategy.configure_train(6, all_heads.arrays, ConfigRecord(), all_heads.grid)
    assert {message.content["config"]["virtual-share"] for message in sent} == {0.0}


def test_where_all_train_but_one_is_sampled_no_weights_and_no_rounds_are_averaged(
    client_grid, distillations
):
    federation = Federation(
        client_grid(6, RUN_CONFIG), heads="all", fraction_train=0.1, min_train_nodes=1
    )
    (reply,) = federation.run().values()
    assert_equal(federation.arrays, reply.content["arrays"], atol=1e-6)
    assert federation.strategy.state_dict()["mean-of"] == 0


def test_where_all_train_a_node_that_keeps_losing_its_data_is_sent_them_ever_more_rarely(
    client_grid, distillations
):
    federation = Federation(client_grid(6, RUN_CONFIG), heads="all")
    federation.run()
    node = next(c for c in federation.strategy.topology.clusters if len(c) > 1)[0]

    def forget(content):
        content["metrics"][NUM_PARCELS] = 0

    spoil(federation.grid, node, forget, TRAIN_POOL)
    sent = []
    for _ in range(9):
        federation.run()
        sent.append(federation.asked[DISTILL] > 0)
    assert sent == [False, True, False, True, False, False, False, True, False]


def test_where_all_train_a_resumed_strategy_sends_nothing_again(all_heads):
    all_heads.run()
    state = all_heads.strategy.state_dict()
    all_heads.strategy = Federation(all_heads.grid, heads="all", num_rounds=8).strategy
    all_heads.strategy.load_state_dict(state)
    assert set(all_heads.run()) == set(all_heads.ids)
    assert all_heads.asked[DISTILL] == 0
