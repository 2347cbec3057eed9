"""CADIS under Flower's hooks: with nodes made up for it, and with our real ClientApp."""

import json
import logging
import math

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from flwr_distill.protocol.arrays import as_arrays, as_record
from flwr_distill.server.app import main
from flwr_distill.strategies.cadis import CADIS
from flwr_distill.strategies.cadis.similarity import (
    estimated_links,
    similarity_of_a_cluster,
    threshold,
)
from flwr_distill.task.datasets import load_dataset
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.models import create_model
from flwr_distill.task.partition import partition_indices
from tests.errors import at

from .rounds import FIRST

CLASSES = (range(4), range(4, 7), range(7, 10))
START = {
    "first.weight": np.zeros((2, 2), dtype=np.float32),
    "last.weight": np.zeros((2, 3), dtype=np.float32),
    "last.bias": np.zeros(2, dtype=np.float32),
}


def strategy_of(**settings):
    return CADIS(
        **{"fraction_evaluate": 0.0, "min_train_nodes": 1, "min_available_nodes": 1, **settings}
    )


def made_up(change, num_examples=1):
    """A node that changes the last layer's weights so, and says that it trained."""

    def answer(message):
        arrays = as_arrays(message.content.array_records["arrays"])
        changed = {**arrays, "last.weight": arrays["last.weight"] + np.float32(change)}
        metrics = MetricRecord({"num-examples": num_examples, "train-loss": 1.0})
        return RecordDict({"arrays": as_record(changed), "metrics": metrics})

    return answer


def grid_of(memory_grid, *nodes):
    return memory_grid({FIRST + i: node for i, node in enumerate(nodes)})


def play(strategy, grid, server_round=1, arrays=None):
    """One round, as Flower's loop does it."""
    messages = strategy.configure_train(
        server_round, arrays or as_record(START), ConfigRecord({"lr": 0.1}), grid
    )
    return strategy.aggregate_train(server_round, grid.send_and_receive(messages))[0]


def last(arrays):
    return arrays["last.weight"].numpy()


def found(strategy):
    """Clusters of nodes, by their places in the grid."""
    return sorted(sorted(node - FIRST for node in one) for one in strategy.topology.clusters)


def random_changes(seed, size=6):
    """Changes of a large cluster, a small one, and a loner."""
    generator = np.random.default_rng(seed)
    directions = generator.normal(size=(3, 2, 3))
    of_node = [0] * (size - 3) + [1, 1, 2]
    return [directions[c] + 0.02 * generator.normal(size=(2, 3)) for c in of_node]


def weights_by_hand(changes, num_examples):
    """Eq. 1, 2 and 11-13 in loops, for a first round with everyone."""
    n = len(changes)
    s = {
        (i, j): float((changes[i] * changes[j]).sum())
        / math.sqrt(float((changes[i] ** 2).sum()) * float((changes[j] ** 2).sum()))
        for i in range(n)
        for j in range(n)
        if i != j
    }
    q = {pair: (x - min(s.values())) / (max(s.values()) - min(s.values())) for pair, x in s.items()}
    same = [{i} | {j for j in range(n) if j != i and q[i, j] > 0.975} for i in range(n)]
    for _ in range(n):
        same = [set().union(*(same[j] for j in members)) for members in same]
    u = [1 / len(same[i]) * num_examples[i] / sum(num_examples) for i in range(n)]
    return [u_i / sum(u) for u_i in u]


@pytest.mark.parametrize("seed", range(4))
def test_a_round_is_the_papers_weighted_mean(memory_grid, seed):
    changes, num_examples = random_changes(seed), [30, 10, 20, 40, 15, 25]
    nodes = map(made_up, changes, num_examples)
    result = play(strategy_of(most_say=6.0), grid_of(memory_grid, *nodes))
    weights = weights_by_hand(changes, num_examples)
    expected = sum(u * change for u, change in zip(weights, changes, strict=True))
    np.testing.assert_allclose(last(result), expected, atol=1e-6)


def test_without_a_main_cluster_nodes_weigh_by_their_samples(memory_grid, caplog):
    caplog.set_level(logging.INFO, logger="flwr")
    directions = np.eye(6).reshape(6, 2, 3)
    changes = [directions[node] for node in (0, 0, 0, 1, 2, 3, 4, 5)]
    nodes = [made_up(change, num_examples=10) for change in changes]
    mean = sum(changes) / len(changes)
    np.testing.assert_allclose(last(play(strategy_of(), grid_of(memory_grid, *nodes))), mean)
    assert "no main cluster" in caplog.text
    paper = last(play(strategy_of(main_cluster=0.0, most_say=8.0), grid_of(memory_grid, *nodes)))
    np.testing.assert_allclose(paper, sum(directions) / 6)


@pytest.mark.parametrize(
    ("loners", "settings", "say"),
    [(1, {}, 0.2), (3, {}, 0.6), (1, {"most_say": 10.0}, 1 / 2), (3, {"most_say": 10.0}, 3 / 4)],
)
def test_a_small_cluster_has_the_same_say_as_a_large_one_up_to_a_cap(
    memory_grid, loners, settings, say
):
    many, *few = np.eye(6)[: loners + 1].reshape(-1, 2, 3)
    nodes = [made_up(many)] * (10 - loners) + [made_up(one, num_examples=1) for one in few]
    found = last(play(strategy_of(**settings), grid_of(memory_grid, *nodes)))
    np.testing.assert_allclose(found, (1 - say) * many + say * np.mean(few, axis=0), atol=1e-6)


def test_nodes_are_regularised_once_there_is_a_main_cluster(memory_grid):
    def weights(strategy, changes):
        """The regulariser's weight in two rounds, the second by a resumed run."""
        grid = grid_of(memory_grid, *map(made_up, changes))
        play(strategy, grid)
        resumed = strategy_of()
        resumed.load_state_dict(strategy.state_dict())
        play(resumed, grid, server_round=2)
        return {
            m.content["config"]["server-round"]: m.content["config"]["kd-lambda"]
            for m in grid.pushed
        }

    directions = np.eye(6).reshape(6, 2, 3)
    alike = [directions[node] for node in (0, 0, 0, 1, 2)]
    assert weights(strategy_of(), alike) == {1: 0.0, 2: 1.0}
    pairs = [directions[node] for node in (0, 0, 1, 1, 2, 2)]
    assert weights(strategy_of(), pairs) == {1: 0.0, 2: 0.0}
    assert weights(strategy_of(main_cluster=0.0), alike)[1] == 1.0
    assert weights(strategy_of(aggregation="samples"), pairs)[1] == 1.0


def reversing(honest):
    """A node that trains like another, and sends its update with its sign changed."""

    def answer(message):
        content = honest(message)
        start = as_arrays(message.content.array_records["arrays"])
        sent = {n: 2 * start[n] - array for n, array in as_arrays(content["arrays"]).items()}
        content["arrays"] = as_record(sent)
        return content

    return answer


DEFENDED = {"rule": "agreement", "most_say": 1.0}


def test_what_points_against_the_last_step_and_the_others_is_set_aside(memory_grid, caplog):
    generator = np.random.default_rng(0)
    honest = [made_up(1 + 0.1 * generator.normal(size=(2, 3)), 10) for _ in range(8)]
    strategy, alone = strategy_of(**DEFENDED), strategy_of(**DEFENDED)
    first = play(strategy, grid_of(memory_grid, *honest), 1)
    play(alone, grid_of(memory_grid, *honest), 1)
    with caplog.at_level(logging.WARNING, logger="flwr"):
        attacked = grid_of(memory_grid, *honest, *map(reversing, honest[:2]))
        second = play(strategy, attacked, 2, first)
    for node in (FIRST + 8, FIRST + 9):
        assert f"node {node} to train rejected: it points against the last step" in caplog.text
    expected = play(alone, grid_of(memory_grid, *honest), 2, first)
    np.testing.assert_allclose(last(second), last(expected), atol=1e-6)


def test_a_long_update_and_a_great_claim_do_not_outweigh_the_others(memory_grid):
    honest = [made_up(np.ones((2, 3)), 10)] * 8
    greedy = [made_up(np.diag([50.0, 0, 0])[:2], 10**6)] * 2
    found = last(play(strategy_of(**DEFENDED), grid_of(memory_grid, *honest, *greedy)))
    assert np.abs(found - 1).max() < 0.5


@pytest.mark.parametrize("rule", ["agreement", "multi-krum", "trimmed-mean"])
def test_within_a_cluster_the_mean_is_by_the_rule(memory_grid, rule, caplog):
    """The hostile node's last layer is that of the others, so that it is in their cluster."""

    def node(first):
        def answer(message):
            content = made_up(np.ones((2, 3)))(message)
            content["arrays"]["first.weight"] = as_record({"w": np.float32(first)})["w"]
            return content

        return answer

    honest, hostile = 2 * np.eye(2), 2 * np.eye(2)[::-1]
    nodes = [node(honest)] * 6 + [node(hostile)]
    with caplog.at_level(logging.WARNING, logger="flwr"):
        strategy = strategy_of(rule=rule, main_cluster=0.0)
        arrays = play(strategy, grid_of(memory_grid, *nodes))
    assert found(strategy) == [list(range(7))]
    np.testing.assert_allclose(arrays["first.weight"].numpy(), honest, atol=1e-6)
    left_out = f"node {FIRST + 6} to train rejected: it is out of line with its cluster"
    assert (left_out in caplog.text) == (rule != "trimmed-mean")


def test_without_its_aggregation_it_is_fedavg(memory_grid):
    nodes = list(map(made_up, random_changes(0), [30, 10, 20, 40, 15, 25]))
    strategy = strategy_of(aggregation="samples")
    ours = play(strategy, grid_of(memory_grid, *nodes))
    theirs = play(FedAvg(), grid_of(memory_grid, *nodes))
    np.testing.assert_allclose(last(ours), last(theirs), atol=1e-6)
    assert strategy.topology is None


def test_nodes_are_asked_for_the_regulariser(memory_grid):
    strategy = strategy_of(kd_lambda=0.3, feature_layer="last", main_cluster=0.0)
    grid = grid_of(memory_grid, made_up(1.0))
    play(strategy, grid)
    config = grid.pushed[0].content.config_records["config"]
    assert (config["kd-lambda"], config["feature-layer"]) == (0.3, "last")
    assert (config["lr"], config["server-round"]) == (0.1, 1)


def test_the_layer_that_is_named_is_compared(memory_grid):
    def node(first, last):
        def answer(message):
            content = made_up(last)(message)
            arrays = {**START, "last.weight": START["last.weight"] + np.float32(last)}
            arrays["first.weight"] = np.float32(first) * np.eye(2, dtype=np.float32)
            content["arrays"] = as_record(arrays)
            return content

        return answer

    nodes = [node(1, 1), node(1, -1), node(-1, 1), node(-1, -1)]
    for layer, expected in (("", [[0, 2], [1, 3]]), ("first", [[0, 1], [2, 3]])):
        strategy = strategy_of(feature_layer=layer)
        play(strategy, grid_of(memory_grid, *nodes))
        assert found(strategy) == expected


@pytest.mark.parametrize("layer", ["middle", "", "conv"])
def test_a_model_without_the_dense_layer_is_refused_with_those_it_has(memory_grid, layer):
    convolution = {"conv.weight": np.zeros((2, 2, 3, 3), np.float32)}
    arrays = as_record({"last.bias": np.zeros(2)} if not layer else {**convolution, **START})
    layers = "first.weight, last.weight" if layer else "no such layer"
    refusal = at("train.feature-layer", value=layer)
    with pytest.raises(SettingsError, match=layers, check=refusal):
        play(strategy_of(feature_layer=layer), grid_of(memory_grid), arrays=arrays)


def spoiled(kind):
    def answer(message):
        content = made_up(np.ones((2, 3)))(message)
        arrays = as_arrays(content["arrays"])
        if kind == "shape":
            arrays["last.weight"] = np.ones((4, 3), dtype=np.float32)
        else:
            arrays["last.weight"] = np.full((2, 3), kind, dtype=np.float32)
        content["arrays"] = as_record(arrays)
        return content

    return answer


@pytest.mark.parametrize("kind", ["shape", math.nan, math.inf])
def test_a_client_whose_update_is_no_use_is_set_aside_with_a_line(memory_grid, kind, caplog):
    changes = random_changes(1)
    nodes = list(map(made_up, changes))
    strategy, without = strategy_of(), strategy_of()
    with caplog.at_level(logging.WARNING, logger="flwr"):
        result = play(strategy, grid_of(memory_grid, *nodes, spoiled(kind)))
    assert f"node {FIRST + len(nodes)} to train rejected: last.weight" in caplog.text
    np.testing.assert_array_equal(last(result), last(play(without, grid_of(memory_grid, *nodes))))
    assert FIRST + len(nodes) not in strategy.places


def test_a_single_participant_is_its_own_cluster(memory_grid):
    strategy, change = strategy_of(), np.arange(6).reshape(2, 3)
    np.testing.assert_allclose(last(play(strategy, grid_of(memory_grid, made_up(change)))), change)
    assert found(strategy) == [[0]]


@pytest.mark.parametrize("change", [np.ones((2, 3)), np.zeros((2, 3))])
def test_where_nothing_tells_clients_apart_it_is_fedavg(memory_grid, change):
    nodes = [made_up(change, n) for n in (10, 20, 30)]
    strategy = strategy_of()
    np.testing.assert_allclose(last(play(strategy, grid_of(memory_grid, *nodes))), change)
    assert found(strategy) == [[0, 1, 2]]


def test_clients_meet_through_rounds_and_those_who_left_stay_known(memory_grid):
    changes = random_changes(2)
    everyone = list(map(made_up, changes))
    strategy = strategy_of()
    grid = grid_of(memory_grid, *everyone)
    all_nodes = dict(grid.nodes)
    for server_round, present in enumerate([(0, 1, 3, 5), (1, 2, 4, 5), (3, 4)], 1):
        grid.nodes = {FIRST + i: all_nodes[FIRST + i] for i in present}
        play(strategy, grid, server_round)
    assert found(strategy) == [[0, 1, 2], [3, 4], [5]]


def test_clusters_do_not_fall_apart_when_their_changes_become_noise(memory_grid):
    generator, strategy = np.random.default_rng(0), strategy_of()
    first = grid_of(memory_grid, *map(made_up, random_changes(4)))
    play(strategy, first)
    clusters = found(strategy)
    for server_round in range(2, 12):
        noise = generator.normal(size=(6, 2, 3))
        play(strategy, grid_of(memory_grid, *map(made_up, noise)), server_round)
    assert found(strategy) == clusters == [[0, 1, 2], [3, 4], [5]]


def test_the_pair_most_alike_of_those_that_met_first_is_not_a_cluster_for_ever(memory_grid):
    changes = random_changes(5)
    grid = grid_of(memory_grid, *map(made_up, changes))
    all_nodes, strategy = dict(grid.nodes), strategy_of()
    for server_round, present in enumerate([(0, 3), (0, 3, 5), range(6)], 1):
        grid.nodes = {FIRST + i: all_nodes[FIRST + i] for i in present}
        play(strategy, grid, server_round)
    assert found(strategy) == [[0, 1, 2], [3, 4], [5]]


def test_a_strategy_that_was_restarted_goes_on_as_if_it_had_not(memory_grid):
    strategies = [strategy_of(), strategy_of(), strategy_of()]
    grid = grid_of(memory_grid, *map(made_up, random_changes(3)))
    all_nodes = dict(grid.nodes)
    grid.nodes = {node: all_nodes[node] for node in list(all_nodes)[:4]}
    arrays = play(strategies[0], grid)
    strategies[1].load_state_dict(strategies[0].state_dict())
    grid.nodes = {node: all_nodes[node] for node in list(all_nodes)[2:]}
    results = [last(play(strategy, grid, 2, arrays)) for strategy in strategies]
    np.testing.assert_array_equal(results[0], results[1])
    assert found(strategies[0]) == found(strategies[1]) != found(strategies[2])


OF_NODE = np.repeat([0, 1, 2], [12, 5, 3])


def softmax_node(node, seed):
    """A node that trains softmax regression on synthetic samples of its cluster's classes."""
    means = np.random.default_rng(seed).normal(size=(10, 30))
    generator = np.random.default_rng([seed, node])

    def answer(message):
        weights = as_arrays(message.content.array_records["arrays"])["last.weight"]
        labels = generator.choice(CLASSES[OF_NODE[node]], 400)
        inputs = means[labels] + 0.5 * generator.normal(size=(400, 30))
        trained = weights.astype(np.float64)
        for _ in range(5):
            scores = np.exp(inputs @ trained.T)
            errors = scores / scores.sum(axis=1, keepdims=True) - np.eye(10)[labels]
            trained -= 0.01 * errors.T @ inputs / len(inputs)
        return made_up(trained - weights)(message)

    return answer


def one_step_clusters(strategy, server_round, *, estimate):
    """Which of the nodes seen share a cluster by eq. 13 and one step through a third (n, n).

    As the authors' code closes its clusters; with estimates of pairs that never met, or without.
    """
    known, clients = strategy.known, np.arange(len(strategy.places))
    needed = similarity_of_a_cluster(known.peaks, threshold(server_round))
    linked = np.eye(len(clients), dtype=int)
    linked[known.links(needed)] = 1
    if estimate:
        rows, generator = known.rows(clients, len(clients)), np.random.default_rng(server_round)
        linked[estimated_links(rows, clients, needed, generator)] = 1
    linked = np.maximum(linked, linked.T)
    return linked @ linked > 0


def rounds_until_found(memory_grid, seed, most=45):
    """Rounds of 6 of 20 nodes until CADIS has the clusters, and one step with and without it."""
    strategy, generator = strategy_of(), np.random.default_rng(seed)
    nodes = [softmax_node(node, seed) for node in range(20)]
    arrays = as_record({"last.weight": np.zeros((10, 30), dtype=np.float32)})
    first = {}
    for server_round in range(1, most):
        present = np.sort(generator.choice(20, 6, replace=False))
        grid = memory_grid({FIRST + int(node): nodes[node] for node in present})
        arrays = play(strategy, grid, server_round, arrays)
        of_place = OF_NODE[[node - FIRST for node in strategy.places]]
        together = of_place[:, None] == of_place
        has_them = {
            "cadis": found(strategy) == in_clusters(OF_NODE),
            **{
                estimate: len(of_place) == 20
                and (one_step_clusters(strategy, server_round, estimate=estimate) == together).all()
                for estimate in (True, False)
            },
        }
        for way in (way for way, right in has_them.items() if right):
            first.setdefault(way, server_round)
        if len(first) == len(has_them):
            break
    return [first.get(way, most) for way in ("cadis", True, False)]


def in_clusters(cluster_of):
    return [np.flatnonzero(cluster_of == c).tolist() for c in np.unique(cluster_of)]


def test_transitive_learning_finds_the_clusters_in_fewer_rounds_than_without(memory_grid):
    rounds = np.array([rounds_until_found(memory_grid, seed) for seed in range(5)])
    cadis, with_estimates, without = rounds.mean(axis=0)
    assert cadis <= with_estimates < without


RUN = {
    "partition.scheme": "cluster-mc",
    "train.lr": 0.01,
    "train.batch-size": 8,
    "train.local-epochs": 2,
    "train.holdout": 0.0,
    "model": "mlp",
}


def test_known_label_clusters_are_found_by_real_clients_that_lack_most_classes(client_grid):
    strategy, grid = strategy_of(), client_grid(20, RUN)
    model = create_model("mlp", load_dataset("digits").spec, seed=0)
    arrays = ArrayRecord(model.state_dict())
    for server_round in (1, 2):
        arrays = play(strategy, grid, server_round, arrays)
    assert found(strategy) == in_clusters(OF_NODE)


def test_a_client_that_lacks_a_class_of_its_cluster_has_a_say_of_its_own(client_grid, tmp_path):
    digits = load_dataset("digits")
    parts = partition_indices(digits.train.labels, 6, scheme="cluster-mc", clusters="1:1")
    parts[0] = parts[0][digits.train.labels[parts[0]] != 2]
    index_file = tmp_path / "parts.json"
    index_file.write_text(json.dumps({str(i): part.tolist() for i, part in enumerate(parts)}))
    by_file = {"partition.scheme": "index-file", "partition.index-file": str(index_file)}
    strategy, grid = strategy_of(), client_grid(6, {**RUN, **by_file})
    arrays = ArrayRecord(create_model("mlp", digits.spec, seed=0).state_dict())
    for server_round in (1, 2):
        arrays = play(strategy, grid, server_round, arrays)
        assert found(strategy) == [[0], [1, 2], [3, 4, 5]]
    assert all(np.isfinite(array.numpy()).all() for array in arrays.values())


def test_a_whole_run_leaves_its_clusters(client_grid, tmp_path):
    run_config = {
        **RUN,
        "strategy": "cadis",
        "num-rounds": 2,
        "fraction-train": 0.5,
        "runs-dir": str(tmp_path),
    }
    main(client_grid(10, run_config), Context(4, 1, {}, RecordDict(), run_config))
    topology = json.loads((tmp_path / "4" / "topology.json").read_text())
    nodes = [node for cluster in topology["clusters"] for node in cluster["members"]]
    assert len(nodes) == len(set(nodes)) >= 5
    assert {cluster["head"] for cluster in topology["clusters"]} == {None}
