"""FedHEAD when leaders and members are lost, come back or come late; and after a restart."""

import copy

import pytest
from flwr.app import ConfigRecord

from flwr_distill.protocol.messages import DELIVERY
from flwr_distill.strategies.common.directory import Directory
from flwr_distill.strategies.common.topology import Cluster
from flwr_distill.strategies.fedhead import FedHEAD
from flwr_distill.strategies.fedhead.method import (
    AGGREGATE_SECTOR,
    DISTILL_SECTOR,
    HAND_IN,
    TRAIN_SECTOR,
)
from flwr_distill.strategies.fedhead.plus import FedHEADPlus
from flwr_distill.task.datasets import auxiliary_images

from .rounds import FIRST, MODEL, SPEC, assert_equal, first_clusters, play, spoil, start

RUN_CONFIG = {"partition.classes": 3, "train.local-epochs": 1}  # nodes of unequal size


def strategy_of(kind=FedHEAD, **settings):
    return kind(
        **{"distill_epochs": 3, "least_classes": 0.0, "least_gain": 0.0, **settings},
    )


def phases(grid, node=None):
    """Message types as they were sent, to all nodes or to one."""
    return [
        message.metadata.message_type
        for message in grid.pushed
        if node in (None, message.metadata.dst_node_id)
    ]


class Losing:
    """Makes nodes fail in a phase: with an error, or without a word, as one whose host is gone."""

    def __init__(self, grid):
        self.lost = {}
        for node, answer in grid.nodes.items():
            grid.nodes[node] = self._failing(node, answer)

    def _failing(self, node, answer):
        def failing(message):
            phases, silently = self.lost.get(node, ((), False))
            if message.metadata.message_type in phases and silently:
                return None
            if message.metadata.message_type in phases:
                raise RuntimeError("this node is lost")
            return answer(message)

        return failing


ALL = (TRAIN_SECTOR, HAND_IN, AGGREGATE_SECTOR, DISTILL_SECTOR)


def one_round(federation, sectors):
    """The round by hand over (leader, other nodes whose models count)."""
    clusters = [Cluster(leader, others) for leader, others in sectors]
    students = federation.fedhead_round(clusters, MODEL.state_dict())
    return federation.mean(students)


@pytest.mark.parametrize("silently", [False, True])
@pytest.mark.parametrize("phase", [TRAIN_SECTOR, AGGREGATE_SECTOR])
def test_a_lost_leaders_sector_averages_at_the_member_with_most_samples_without_retraining(
    client_grid, by_hand, phase, silently
):
    grid = client_grid(7, RUN_CONFIG)
    federation, losing = by_hand(7, RUN_CONFIG, MODEL), Losing(grid)
    strategy = strategy_of(sectors=2)
    lost, whole = first_clusters(strategy, grid)
    losing.lost[lost.head] = (ALL[ALL.index(phase) :], silently)
    grid.pushed.clear()
    found = play(strategy, grid)
    successor = max(lost.members, key=federation.size)
    others = tuple(node for node in lost.members if node != successor)
    assert_equal(
        found, one_round(federation, [(successor, others), (whole.head, whole.members)]), atol=1e-5
    )
    assert strategy.topology.heads == (successor, whole.head)
    assert lost.head in strategy.topology.clusters[0].members
    assert phases(grid).count(TRAIN_SECTOR) == 7
    assert {n for n in grid.nodes if HAND_IN in phases(grid, n)} == set(others)
    assert AGGREGATE_SECTOR not in phases(grid, lost.head) or phase != TRAIN_SECTOR
    assert play(strategy, grid, 2, found) is not None
    assert lost.head not in strategy.topology.heads


def test_the_one_that_takes_over_may_be_lost_too_and_a_member_that_is_silent_is_left_out(
    client_grid, by_hand
):
    grid = client_grid(5, RUN_CONFIG)
    federation, losing = by_hand(5, RUN_CONFIG, MODEL), Losing(grid)
    strategy = strategy_of(sectors=1)
    (cluster,) = first_clusters(strategy, grid)
    second, third, silent, honest = sorted(cluster.members, key=federation.size, reverse=True)
    losing.lost |= {cluster.head: (ALL, True), second: (ALL[2:], False), silent: (ALL[1:], True)}
    found = play(strategy, grid)
    assert strategy.topology.heads == (third,)
    assert_equal(found, one_round(federation, [(third, (honest,))]), atol=1e-5)


def test_a_sector_of_which_nobody_is_left_is_out_of_the_round_and_back_in_the_next(
    client_grid, by_hand, caplog
):
    grid = client_grid(6, RUN_CONFIG)
    losing = Losing(grid)
    strategy = strategy_of(sectors=2)
    lost, whole = first_clusters(strategy, grid)
    losing.lost |= dict.fromkeys((lost.head, *lost.members), (ALL, False))
    found = play(strategy, grid)
    assert_equal(
        found, one_round(by_hand(6, RUN_CONFIG, MODEL), [(whole.head, whole.members)]), atol=1e-5
    )
    said = f"Node {lost.head} no longer leads its cluster, and no other node is able to"
    assert said in caplog.text
    losing.lost.clear()
    play(strategy, grid, 2, found)
    assert phases(grid).count(AGGREGATE_SECTOR) == 1 + 2


def test_over_direct_links_members_that_lost_their_leader_still_reach_its_successor(
    client_grid, by_hand, direct
):
    grid = client_grid(4, RUN_CONFIG, node_config={"peer-address": "here:1"})
    federation, losing = by_hand(4, RUN_CONFIG, MODEL), Losing(grid)
    strategy = strategy_of(sectors=1, links="direct", directory=Directory(most_samples=0))
    (cluster,) = first_clusters(strategy, grid)
    direct.append(cluster.head)
    losing.lost[cluster.head] = (ALL, True)
    grid.pushed.clear()
    found = play(strategy, grid)
    successor = max(cluster.members, key=federation.size)
    others = tuple(node for node in cluster.members if node != successor)
    assert_equal(found, one_round(federation, [(successor, others)]), atol=1e-5)
    payloads = [
        record["payload"]
        for message in grid.pushed
        for name, record in message.content.config_records.items()
        if name.startswith(DELIVERY)
    ]
    assert payloads
    assert not any(payloads)


def test_a_member_that_does_not_reach_its_leader_is_named_with_the_reason(
    client_grid, direct, caplog
):
    grid = client_grid(4, RUN_CONFIG, node_config={"peer-address": "here:1"})
    strategy = strategy_of(sectors=1, links="direct", fixed_leader=True)
    (cluster,) = first_clusters(strategy, grid)
    direct.append(cluster.head)  # alive, but unreachable
    assert play(strategy, grid) is not None
    for member in cluster.members:
        assert f"Node {member} sent its leader nothing: no connection" in caplog.text


def run_of(strategy, grid, rounds, arrays=None, at_round=None):
    for server_round in rounds:
        if at_round:
            at_round(server_round)
        arrays = play(strategy, grid, server_round, arrays)
    return arrays


def reference():
    return auxiliary_images("noise", SPEC, 30, seed=0)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (FedHEAD, {}),
        (FedHEADPlus, {"model": MODEL, "reference_set": reference, "server_epochs": 2}),
    ],
)
def test_a_resumed_run_equals_one_that_was_never_interrupted_to_the_last_bit(
    client_grid, kind, more
):
    """With a leader lost in round 2 and a node that comes after it; ids of nodes are new ones."""

    def federation(first_node=FIRST):
        grid = client_grid(6, RUN_CONFIG, first_node=first_node)
        losing, late = Losing(grid), grid.nodes.pop(first_node + 3)

        def at_round(server_round):
            losing.lost.clear()
            if server_round == 2:
                losing.lost[first_node + leader_of_round_2] = (ALL, False)
            if server_round == 3:
                grid.nodes[first_node + 3] = late

        return grid, at_round

    settings = {"sectors": 2, "seed": 5, **more}
    leader_of_round_2 = 0
    probe, (grid, _) = strategy_of(kind, **settings), federation()
    probe.configure_train(2, start(), ConfigRecord(), grid)
    leader_of_round_2 = probe.topology.heads[0] - FIRST

    whole, (grid, at_round) = strategy_of(kind, **settings), federation()
    expected = run_of(whole, grid, (1, 2, 3, 4), at_round=at_round)

    before, (grid, at_round) = strategy_of(kind, **settings), federation()
    arrays = run_of(before, grid, (1, 2), at_round=at_round)
    after, (grid, at_round) = strategy_of(kind, **settings), federation(FIRST - 10**6)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    found = run_of(after, grid, (3, 4), arrays, at_round)

    assert [h - FIRST + 10**6 for h in after.topology.heads] == [
        h - FIRST for h in whole.topology.heads
    ]
    for name, array in expected.items():
        assert (found[name].numpy() == array.numpy()).all(), name
    assert any((arrays[name].numpy() != array.numpy()).any() for name, array in expected.items())


def test_without_its_state_a_resumed_run_would_be_another(client_grid):
    """Who failed in round 1 leads again in round 2: the state is what stops it."""
    grid = client_grid(6, RUN_CONFIG)
    losing = Losing(grid)
    strategy = strategy_of(sectors=1, fixed_leader=True)
    (cluster,) = first_clusters(strategy, grid)
    losing.lost[cluster.head] = ((AGGREGATE_SECTOR,), False)
    arrays = play(strategy, grid)
    losing.lost.clear()
    resumed, fresh = (strategy_of(sectors=1, fixed_leader=True) for _ in range(2))
    resumed.load_state_dict(strategy.state_dict())
    play(resumed, grid, 2, arrays)
    play(fresh, grid, 2, arrays)
    assert fresh.topology.heads == (cluster.head,) != resumed.topology.heads


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"strategy": "FedHEADPlus", "version": 1, "sector-of": {}, "failed": []},
        {"strategy": "FedHEAD", "version": 0, "sector-of": {}, "failed": []},
    ],
)
def test_the_state_of_another_strategy_or_version_is_refused_by_name(found):
    with pytest.raises(ValueError, match="FedHEAD"):
        strategy_of().load_state_dict(found)


@pytest.mark.parametrize("same_id", [True, False])
def test_a_node_that_comes_back_has_its_old_sector_and_new_ones_join_the_smallest(
    client_grid, same_id
):
    """A node without a key of its own gets a new id from Flower when it comes back."""
    grid = client_grid(8, RUN_CONFIG)
    everyone = dict(grid.nodes)
    again = {**client_grid(8, RUN_CONFIG, first_node=FIRST - 10**6).nodes}
    for node in list(grid.nodes)[6:]:
        del grid.nodes[node]
    strategy = strategy_of(sectors=3)

    def sectors(server_round):
        play(strategy, grid, server_round)
        return [
            {(n - FIRST) % 10**6 for n in (c.head, *c.members)} for c in strategy.topology.clusters
        ]

    first = sectors(1)
    assert sorted(map(len, first)) == [2, 2, 2]
    away = sorted(first[0])
    for i in away:
        del grid.nodes[FIRST + i]
    assert sectors(2) == first[1:]
    for i in away:
        node = FIRST + i if same_id else FIRST - 10**6 + i
        grid.nodes[node] = everyone[node] if same_id else again[node]
    assert sectors(3) == first
    grid.nodes |= {FIRST + i: everyone[FIRST + i] for i in (6, 7)}
    grown = sectors(4)
    assert all(old <= new for old, new in zip(first, grown, strict=True))
    assert sorted(map(len, grown)) == [2, 3, 3]


def test_a_parcel_that_does_not_fit_its_route_costs_its_member_alone(client_grid, caplog):
    grid = client_grid(4, RUN_CONFIG)
    strategy = strategy_of(sectors=1, links="relay", fixed_leader=True)
    (cluster,) = first_clusters(strategy, grid)
    liar = cluster.members[0]

    def misaddress(content):
        if "parcel" in content.config_records:
            content["parcel"] = ConfigRecord({"receiver": "17"})

    spoil(grid, liar, misaddress)
    assert play(strategy, grid) is not None
    assert f"Reply of node {liar} to train.sector rejected" in caplog.text
