"""FedHEAD with our real ClientApp; only the wire is replaced, by a grid in memory."""

import copy
import itertools
import logging
import re

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from flwr_distill.distill.ensemble import distil_ensemble, teacher_probabilities
from flwr_distill.protocol.messages import DELIVERY
from flwr_distill.strategies.common.directory import Description, Directory
from flwr_distill.strategies.common.topology import Cluster
from flwr_distill.strategies.feddf.strategy import FedDF
from flwr_distill.strategies.fedhead import FedHEAD
from flwr_distill.strategies.fedhead.membership import Membership
from flwr_distill.strategies.fedhead.method import (
    AGGREGATE_SECTOR,
    DISTILL_SECTOR,
    HAND_OUT,
    TRAIN_SECTOR,
)
from flwr_distill.strategies.fedhead.plus import FedHEADPlus
from flwr_distill.task.datasets import auxiliary_images

from .rounds import FIRST, MODEL, SPEC, assert_equal, first_clusters, numbers, play, spoil, start

RUN_CONFIG = {"partition.classes": 3, "train.local-epochs": 1}  # nodes of unequal size


def strategy_of(kind=FedHEAD, **settings):
    papers = {} if kind is FedDF else {"least_classes": 0.0, "least_gain": 0.0}
    return kind(**{"distill_epochs": 3, **papers, **settings})


@pytest.mark.parametrize(("lr", "restore_best"), [(1e-3, True), (0.1, False)])
def test_two_rounds_equal_the_papers_steps_computed_in_memory(
    client_grid, by_hand, lr, restore_best
):
    """Also with steps so long that a student gets worse."""
    grid, federation = client_grid(5, RUN_CONFIG), by_hand(5, RUN_CONFIG, MODEL)
    strategy = strategy_of(sectors=2, distill_lr=lr, restore_best=restore_best)
    arrays, weights = start(), MODEL.state_dict()
    for server_round in (1, 2):
        arrays = play(strategy, grid, server_round, arrays)
        clusters = strategy.topology.clusters
        assert sorted(1 + len(cluster.members) for cluster in clusters) == [2, 3]
        students = federation.fedhead_round(
            clusters, weights, server_round, lr=lr, restore_best=restore_best
        )
        weights = federation.mean(students)
        assert_equal(arrays, (weights), atol=1e-5)


@pytest.mark.parametrize("sectors", [1, 2, 3])
def test_without_distillation_a_round_is_fedavg(client_grid, by_hand, sectors):
    """Leaders that cannot distil leave w = sum_m p_m w_m (eq. 9-10)."""
    grid = client_grid(
        5, RUN_CONFIG, lambda node, message: message.metadata.message_type == DISTILL_SECTOR
    )
    found = play(strategy_of(sectors=sectors), grid)
    federation = by_hand(5, RUN_CONFIG, MODEL)
    expected = federation.mean(
        [
            (federation.size(n), federation.trained(n, MODEL.state_dict()).state_dict())
            for n in federation.sessions
        ]
    )
    assert_equal(found, (expected))


def test_a_model_of_transposed_weights_is_averaged_as_any_other(client_grid):
    """Flower sends such arrays as they lie in memory, and nodes keep the model in files."""
    usual, transposed = start(), ArrayRecord()
    for name, array in usual.items():
        transposed[name] = Array(np.asfortranarray(array.numpy()))
    settings = {"sectors": 1, "up_codec": "float16"}
    found, expected = (
        play(strategy_of(**settings), client_grid(3, RUN_CONFIG), 1, arrays)
        for arrays in (transposed, usual)
    )
    assert_equal(found, expected, atol=0)


def test_a_leader_with_few_of_its_sectors_classes_is_not_asked_to_distil(client_grid, caplog):
    """Of nodes 0 to 3 with three classes each, whoever leads holds a third of nine."""
    caplog.set_level(logging.INFO, logger="flwr")
    narrow, wide = (
        client_grid(3, RUN_CONFIG),
        client_grid(3, {**RUN_CONFIG, "partition.classes": 9}),
    )
    averages = client_grid(
        3, RUN_CONFIG, lambda node, message: message.metadata.message_type == DISTILL_SECTOR
    )
    found = play(strategy_of(sectors=1, least_classes=0.5), narrow)
    assert_equal(numbers(found), numbers(play(strategy_of(sectors=1), averages)))
    assert DISTILL_SECTOR not in {message.metadata.message_type for message in narrow.pushed}
    assert "keep their plain averages: these have few classes" in caplog.text
    play(strategy_of(sectors=1, least_classes=0.5), wide)
    assert DISTILL_SECTOR in {message.metadata.message_type for message in wide.pushed}


def test_a_leader_whose_samples_the_ensemble_hardly_predicts_better_does_not_distil(
    client_grid, caplog
):
    caplog.set_level(logging.INFO, logger="flwr")
    averages = client_grid(
        3, RUN_CONFIG, lambda node, message: message.metadata.message_type == DISTILL_SECTOR
    )
    plain = numbers(play(strategy_of(sectors=1), averages))
    found = play(strategy_of(sectors=1, least_gain=0.9), client_grid(3, RUN_CONFIG))
    assert_equal(numbers(found), plain)
    assert "keeps its plain average: its ensemble is no better" in caplog.text
    little = play(strategy_of(sectors=1, least_gain=1e-6), client_grid(3, RUN_CONFIG))
    assert_equal(numbers(little), numbers(play(strategy_of(sectors=1), client_grid(3, RUN_CONFIG))))
    assert any(not np.allclose(numbers(little)[name], plain[name]) for name in plain)


def test_a_node_that_does_not_tell_its_classes_may_distil():
    membership = Membership(1, False, 0, Directory())
    told = {1: None, 2: (0, 1, 2), 3: (3, 4, 5, 6)}
    membership._nodes = {node: Description(10, classes=held) for node, held in told.items()}
    clusters = [Cluster(head, tuple(told.keys() - {head})) for head in told]
    assert membership.narrow_leaders(clusters, 0.5) == [2]
    assert membership.narrow_leaders(clusters, 0.0) == []


def test_fedhead_plus_distils_the_sectors_ensemble_on_the_reference_set(client_grid, by_hand):
    reference = auxiliary_images("noise", SPEC, 50, seed=0)
    settings = {
        "model": MODEL,
        "reference_set": lambda: reference,
        "server_epochs": 4,
        "sectors": 2,
    }
    grid, federation = client_grid(4, RUN_CONFIG), by_hand(4, RUN_CONFIG, MODEL)
    plain, plus = strategy_of(sectors=2), strategy_of(FedHEADPlus, **settings)
    before = play(plain, grid)
    found = play(plus, client_grid(4, RUN_CONFIG))
    students = []
    for size, state in federation.fedhead_round(plus.topology.clusters, MODEL.state_dict()):
        students.append((size, copy.deepcopy(MODEL)))
        students[-1][1].load_state_dict(state)
    teacher = teacher_probabilities(students, reference)

    def divergence(arrays):
        model = copy.deepcopy(MODEL)
        model.load_state_dict({n: torch.tensor(a) for n, a in numbers(arrays).items()})
        with torch.no_grad():
            log_s = model(reference).log_softmax(dim=1)
        return float((teacher * (teacher.log() - log_s)).sum(dim=1).mean())

    assert plain.topology == plus.topology
    assert divergence(found) < divergence(before)


@pytest.mark.parametrize(("lr", "restore_best"), [(1e-3, True), (0.3, False)])
def test_feddf_distils_the_nodes_models_on_the_server(client_grid, by_hand, lr, restore_best):
    reference = auxiliary_images("noise", SPEC, 50, seed=0)
    federation = by_hand(3, RUN_CONFIG, MODEL)
    own = {"distill_lr": lr, "restore_best": restore_best, "server_epochs": 4}
    strategy = strategy_of(FedDF, model=MODEL, reference_set=lambda: reference, seed=5, **own)
    found = play(strategy, client_grid(3, RUN_CONFIG))
    models = [
        (federation.size(n), federation.trained(n, MODEL.state_dict())) for n in federation.sessions
    ]
    student = copy.deepcopy(MODEL)
    student.load_state_dict(federation.mean([(w, m.state_dict()) for w, m in models]))
    words = np.random.SeedSequence([5, 1]).generate_state(1, np.uint64)
    distil_ensemble(
        student,
        reference,
        teacher_probabilities(models, reference),
        epochs=4,
        lr=lr,
        restore_best=restore_best,
        generator=torch.Generator().manual_seed(int(words[0]) >> 1),
    )
    assert_equal(found, student.state_dict(), atol=1e-3)  # steps this long amplify rounding


def test_the_fixed_leader_is_the_node_with_most_data_in_every_round(client_grid, by_hand):
    grid, federation = client_grid(5, RUN_CONFIG), by_hand(5, RUN_CONFIG, MODEL)
    strategy = strategy_of(fixed_leader=True)
    for server_round in (1, 2):
        strategy.configure_train(server_round, start(), ConfigRecord(), grid)
        for cluster in strategy.topology.clusters:
            sizes = [federation.size(n) for n in (cluster.head, *cluster.members)]
            assert sizes[0] == max(sizes)


def test_drawn_leaders_change_between_rounds_and_come_from_the_seed(client_grid):
    def leaders(seed):
        strategy, grid = strategy_of(seed=seed), client_grid(6, RUN_CONFIG)
        drawn = []
        for server_round in range(1, 6):
            strategy.configure_train(server_round, start(), ConfigRecord(), grid)
            drawn.append(strategy.topology.heads)
        return drawn

    assert leaders(1) == leaders(1) != leaders(2)
    assert len(set(leaders(1))) > 1


def test_nodes_are_in_the_sector_that_their_owner_gave_them(client_grid):
    grid = client_grid(3, RUN_CONFIG, node_config={"sector": 4})
    strategy = strategy_of(sectors=3)
    (cluster,) = first_clusters(strategy, grid)
    assert {cluster.head, *cluster.members} == set(grid.nodes)


def note_rejected(grid):
    """How many models each leader rejects, from now on."""
    rejected = []
    for node in list(grid.nodes):
        spoil(grid, node, lambda reply: rejected.append(len(reply["config"])), AGGREGATE_SECTOR)
    return rejected


def test_a_malformed_or_missing_models_node_is_left_out_and_the_round_goes_on(
    client_grid, by_hand, monkeypatch, caplog
):
    """Of one sector's four members one fails, one sends garbage and one sends NaN."""
    grid, federation = client_grid(5, RUN_CONFIG), by_hand(5, RUN_CONFIG, MODEL)
    rejected = note_rejected(grid)
    strategy = strategy_of(sectors=1, fixed_leader=True)
    (cluster,) = first_clusters(strategy, grid)
    failing, garbage, nan, honest = cluster.members
    import flwr_distill.strategies.fedhead.client

    send = flwr_distill.strategies.fedhead.client.send

    def tampered(session, route, payload, deadline):
        if session.node_id == failing:
            raise RuntimeError("this node is broken")
        if session.node_id == garbage:
            payload = b"not a model"
        if session.node_id == nan:
            broken = copy.deepcopy(MODEL)
            broken.state_dict()["0.bias"][0] = torch.nan
            payload = flwr_distill.strategies.fedhead.client.save(
                flwr_distill.strategies.fedhead.client.arrays_of(broken)
            )
        return send(session, route, payload)

    monkeypatch.setattr(flwr_distill.strategies.fedhead.client, "send", tampered)
    found = play(strategy, grid)
    assert rejected == [2]
    for node, reason in ((garbage, "list of arrays"), (nan, "0.bias holds NaN or infinity")):
        said = f"node {node} to train.sector rejected: leader {cluster.head} rejects it: .*{reason}"
        assert re.search(said, caplog.text), caplog.text
    pair = [type(cluster)(head=cluster.head, members=(honest,))]
    expected = federation.mean(federation.fedhead_round(pair, MODEL.state_dict()))
    assert_equal(found, (expected), atol=1e-5)


@pytest.mark.parametrize("phase", [TRAIN_SECTOR, AGGREGATE_SECTOR, DISTILL_SECTOR])
def test_a_leader_that_fails_does_not_end_the_round_nor_lead_the_next(client_grid, phase):
    lost = []

    def broken(index, message):
        is_late = message.metadata.message_type == phase
        return is_late and FIRST + index in lost

    grid = client_grid(6, RUN_CONFIG, broken)
    strategy = strategy_of(sectors=2)
    strategy.configure_train(1, start(), ConfigRecord(), grid)
    lost.append(strategy.topology.heads[0])
    first = play(strategy, grid)
    assert all(np.isfinite(array).all() for array in numbers(first).values())
    second = play(strategy, grid, 2, first)
    assert second is not None
    assert lost[0] not in strategy.topology.heads


@pytest.mark.parametrize(
    ("phase", "how"),
    [
        *itertools.product([AGGREGATE_SECTOR, DISTILL_SECTOR], ["nan", "shape", "name"]),
        (AGGREGATE_SECTOR, "no model"),  # a leader may have no student
    ],
)
def test_a_leader_that_sends_a_malformed_model_does_not_lead_the_next_round(
    client_grid, how, phase
):
    grid = client_grid(4, RUN_CONFIG)
    strategy = strategy_of(sectors=1, fixed_leader=True)
    strategy.configure_train(1, start(), ConfigRecord(), grid)
    (leader,) = strategy.topology.heads

    def malform(content):
        sent = {name: array.numpy().copy() for name, array in content["arrays"].items()}
        first = next(iter(sent))
        if how == "nan":
            sent[first][...] = np.nan
        if how == "shape":
            sent[first] = sent[first][..., None]
        if how == "name":
            sent["odd"] = sent.pop(first)
        content["arrays"] = ArrayRecord({n: Array(a) for n, a in sent.items()})
        if how == "no model":
            del content["arrays"]

    spoil(grid, leader, malform, phase)
    first = play(strategy, grid)
    assert all(np.isfinite(array).all() for array in numbers(first).values())
    strategy.configure_train(2, first, ConfigRecord(), grid)
    assert leader not in strategy.topology.heads


def test_the_training_loss_of_a_round_is_the_nodes_mean_by_samples(client_grid):
    grid = client_grid(3, RUN_CONFIG)
    strategy, told = strategy_of(sectors=1), []
    for place, node in enumerate(list(grid.nodes)):

        def report(content, loss=10.0**place):
            content["metrics"]["train-loss"] = loss
            told.append((content["metrics"]["num-examples"], loss))

        spoil(grid, node, report, TRAIN_SECTOR)
    messages = strategy.configure_train(1, start(), ConfigRecord({"lr": 0.05}), grid)
    _, metrics = strategy.aggregate_train(1, grid.send_and_receive(messages))
    mean = sum(count * loss for count, loss in told) / sum(count for count, _ in told)
    assert mean != pytest.approx(111 / 3, rel=1e-3)
    assert metrics == {"train-loss": pytest.approx(mean)}


def test_a_node_that_leaves_is_done_without_and_a_late_one_joins(client_grid):
    grid = client_grid(6, RUN_CONFIG)
    late, gone = FIRST + 5, FIRST + 1
    answer = grid.nodes.pop(late)
    strategy = strategy_of(sectors=2)
    first = play(strategy, grid)
    grid.nodes[late] = answer
    del grid.nodes[gone]
    play(strategy, grid, 2, first)
    taking_part = {*strategy.topology.heads, *strategy.topology.head_of}
    assert taking_part == {FIRST + i for i in (0, 2, 3, 4, 5)}


def test_a_round_does_not_wait_for_nodes_that_have_gone_for_good(client_grid):
    grid = client_grid(4, RUN_CONFIG)
    strategy = strategy_of(min_available_nodes=4)
    first = play(strategy, grid)
    del grid.nodes[FIRST]
    assert play(strategy, grid, 2, first) is not None


def test_when_every_leader_fails_the_global_model_stays(client_grid):
    grid = client_grid(
        4, RUN_CONFIG, lambda node, message: message.metadata.message_type == AGGREGATE_SECTOR
    )
    assert play(strategy_of(), grid) is None


def test_a_node_that_cannot_say_who_it_is_takes_no_part(client_grid):
    grid = client_grid(4, RUN_CONFIG)
    grid.nodes[FIRST] = lambda message: RecordDict()
    strategy = strategy_of()
    assert play(strategy, grid) is not None
    assert FIRST not in {*strategy.topology.heads, *strategy.topology.head_of}


def model_transfers(grid, since):
    """How many models the server sent, and how many parcels with content passed it."""
    sent = grid.pushed[since:]
    down = sum(1 for message in sent if message.content.array_records)
    relayed = sum(
        1
        for message in sent
        for name, record in message.content.config_records.items()
        if name.startswith(DELIVERY) and record["payload"]
    )
    return down, relayed


@pytest.mark.parametrize("num_nodes", [4, 8])
def test_over_direct_links_the_server_exchanges_models_with_leaders_only(
    client_grid, direct, num_nodes
):
    """Table 1: 2 M transfers down (and up) a round, however many nodes there are."""
    relay = client_grid(num_nodes, RUN_CONFIG)
    grid = client_grid(num_nodes, RUN_CONFIG, node_config={"peer-address": "here:1"})
    strategy, relayed = strategy_of(sectors=2), strategy_of(sectors=2)
    first = play(strategy, grid)
    assert_equal(numbers(first), numbers(play(relayed, relay)), atol=0)
    since = len(grid.pushed)
    second = play(strategy, grid, 2, first)
    assert model_transfers(grid, since) == (4, 0)
    since = len(relay.pushed)
    assert_equal(numbers(second), numbers(play(relayed, relay, 2, first)), atol=0)
    assert model_transfers(relay, since) == (num_nodes + 2, num_nodes - 2)


def test_a_member_that_its_leader_cannot_reach_gets_the_model_from_the_server(client_grid, direct):
    grid = client_grid(4, RUN_CONFIG, node_config={"peer-address": "here:1"})
    strategy = strategy_of(sectors=1, fixed_leader=True)
    strategy.configure_train(1, start(), ConfigRecord(), grid)
    direct.append(strategy.topology.clusters[0].members[1])
    since = len(grid.pushed)
    assert play(strategy, grid) is not None
    assert model_transfers(grid, since) == (3, 0)  # to the leader twice, to that member once


@pytest.mark.parametrize("fixed_leader", [True, False])
def test_a_leader_that_cannot_hand_out_is_replaced_at_once(client_grid, direct, fixed_leader):
    lost = []

    def broken(index, message):
        return message.metadata.message_type == HAND_OUT and FIRST + index in lost

    grid = client_grid(6, RUN_CONFIG, broken, node_config={"peer-address": "here:1"})
    strategy = strategy_of(fixed_leader=fixed_leader)
    strategy.configure_train(1, start(), ConfigRecord(), grid)
    lost.append(strategy.topology.heads[0])
    since = len(grid.pushed)
    assert play(strategy, grid) is not None
    replaced, other = strategy.topology.clusters
    assert lost[0] in replaced.members
    assert lost[0] not in strategy.topology.heads
    assert model_transfers(grid, since) == (2 + 3 + 2, 0)  # to leaders; to that sector's nodes
    assert {replaced.head, other.head} == {
        message.metadata.dst_node_id
        for message in grid.pushed
        if message.metadata.message_type == DISTILL_SECTOR
    }


def test_when_no_leader_can_hand_out_the_server_does(client_grid, direct):
    def broken(node, message):
        return message.metadata.message_type == HAND_OUT

    grid = client_grid(4, RUN_CONFIG, broken, node_config={"peer-address": "here:1"})
    assert play(strategy_of(), grid) is not None


def test_a_node_that_leads_no_sector_refuses_to_distil(client_grid):
    grid = client_grid(2, RUN_CONFIG)
    strategy = strategy_of(sectors=1)
    asked = strategy.settings.ensemble_distillation.model_dump(by_alias=True)
    asked |= {"server-round": 3, "least-gain": 0.0}
    content = RecordDict({"arrays": start(), "config": ConfigRecord(asked)})
    play(strategy, grid, server_round=2)
    message = grid.pushed[-1]
    assert message.metadata.message_type == DISTILL_SECTOR
    message = type(message)(content, message.metadata.dst_node_id, DISTILL_SECTOR)
    (reply,) = grid.send_and_receive([message])
    assert "no sector's models of round 3" in reply.error.reason
