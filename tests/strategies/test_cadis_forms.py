"""CADIS in the forms that its settings choose, against the paper's equations as loops."""

import itertools
import math

import numpy as np
import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from flwr_distill.protocol.arrays import as_arrays, as_record
from flwr_distill.strategies.cadis import CADIS
from flwr_distill.strategies.cadis.similarity import cluster_sizes, threshold

from .rounds import FIRST

START = as_record({"last.weight": np.zeros((2, 3), dtype=np.float32)})
PAPER = {"main_cluster": 0.0, "most_say": 100.0}
"""What no form of the paper has is off."""
KEYS = ("similarity", "rescaling", "closure", "cluster_size", "aggregation")
FORMS = [
    dict(zip(KEYS, form, strict=True))
    for form in itertools.product(
        ("peak", "mean"),
        ("pairs", "positive"),
        ("full", "one-step", "none"),
        ("participants", "seen"),
        ("clusters", "cluster-sizes"),
    )
]


def node_of(change, num_examples):
    """A node that changes the last layer's weights so."""

    def answer(message):
        arrays = as_arrays(message.content.array_records["arrays"])
        changed = {"last.weight": arrays["last.weight"] + np.float32(change)}
        metrics = MetricRecord({"num-examples": num_examples, "train-loss": 1.0})
        return RecordDict({"arrays": as_record(changed), "metrics": metrics})

    return answer


def steps_of(strategy, memory_grid, rounds, num_examples):
    """What each round changes, of rounds that give a change for each node present."""
    steps = []
    for server_round, changes in enumerate(rounds, 1):
        grid = memory_grid({FIRST + i: node_of(c, num_examples[i]) for i, c in changes.items()})
        messages = strategy.configure_train(server_round, START, ConfigRecord({}), grid)
        arrays, _ = strategy.aggregate_train(server_round, grid.send_and_receive(messages))
        steps.append(arrays["last.weight"].numpy())
    return steps


def strategy_of(**settings):
    sampling = {"fraction_evaluate": 0.0, "min_train_nodes": 1, "min_available_nodes": 1}
    return CADIS(**sampling, **{**PAPER, **settings})


def steps_by_hand(rounds, num_examples, form, eps=0.975):
    """Eq. 1, 2 and 11-13 in loops over all clients seen."""
    s_of_rounds, peaks, steps = {}, {}, []
    for t, changes in enumerate(rounds):
        for i, j in itertools.combinations(sorted(changes), 2):
            x, y = changes[i].ravel(), changes[j].ravel()
            s = float(x @ y) / math.sqrt(float(x @ x) * float(y @ y))
            s_of_rounds.setdefault((i, j), []).append(s)
        means = {pair: sum(values) / len(values) for pair, values in s_of_rounds.items()}
        peaks = {pair: max(mean, peaks.get(pair, -1)) for pair, mean in means.items()}
        S = peaks if form["similarity"] == "peak" else means
        scale = list(S.values())
        if form["rescaling"] == "positive":
            scale = [s for s in scale if s > 0] + [1.0]
        Q = {pair: (s - min(scale)) / (max(scale) - min(scale)) for pair, s in S.items()}
        seen = sorted({i for changes in rounds[: t + 1] for i in changes})
        alike = {(i, i) for i in seen} | {pair for pair, q in Q.items() if q > eps}
        alike |= {(j, i) for i, j in alike}
        for _ in range({"none": 0, "one-step": 1, "full": len(seen)}[form["closure"]]):
            alike = {(i, j) for i, k in alike for m, j in alike if m == k}
        counted = seen if form["cluster_size"] == "seen" else sorted(changes)
        u = {
            i: (1 if form["aggregation"] == "cluster-sizes" else num_examples[i])
            / sum((i, j) in alike for j in counted)
            for i in changes
        }
        steps.append(sum(u[i] * changes[i] for i in changes) / sum(u.values()))
        eps = min(eps * 1.0005**t, 0.985)
    return steps


def rounds_of(seed, num_rounds=8):
    """Rounds of some of 9 nodes, whose changes are those of clusters of 4, 3, 1 and 1."""
    generator = np.random.default_rng(seed)
    directions = generator.normal(size=(4, 2, 3))
    clusters, rounds = [0, 0, 0, 0, 1, 1, 1, 2, 3], []
    for _ in range(num_rounds):
        present = generator.choice(9, 6, replace=False).tolist()
        noise = 0.25 * generator.normal(size=(9, 2, 3))
        rounds.append({i: directions[clusters[i]] + noise[i] for i in present})
    return rounds


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "/".join(form.values()))
@pytest.mark.parametrize("seed", range(2))
def test_each_form_of_the_rule_is_the_papers_equations(memory_grid, form, seed):
    rounds, num_examples = rounds_of(seed), [30, 10, 20, 40, 15, 25, 35, 50, 5]
    strategy = strategy_of(**form, transitive="off", eps=0.9, max_eps=0.985)
    steps = steps_of(strategy, memory_grid, rounds, num_examples)
    by_hand = steps_by_hand(rounds, num_examples, form, eps=0.9)
    np.testing.assert_allclose(steps, by_hand, atol=1e-5)


def test_the_forms_differ(memory_grid):
    """So that each setting has been compared where it matters."""
    rounds, num_examples = rounds_of(0), [30, 10, 20, 40, 15, 25, 35, 50, 5]
    steps = [steps_by_hand(rounds, num_examples, form, eps=0.9) for form in FORMS]
    for key in FORMS[0]:
        others = [{k: v for k, v in form.items() if k != key} for form in FORMS]
        same = [
            np.allclose(steps[a], steps[b])
            for a, b in itertools.combinations(range(len(FORMS)), 2)
            if others[a] == others[b]
        ]
        assert not all(same), key


@pytest.mark.parametrize(("transitive", "size"), [("off", 2), ("round", 2), ("all", 3)])
def test_a_pair_that_never_met_is_estimated_through_a_node_that_is_away(
    memory_grid, transitive, size
):
    """Nodes 0 and 2 are like node 1, which met both and misses the last round; 3 is like nobody."""
    first, second = np.eye(2, 6).reshape(2, 2, 3)
    nearly = first + 1e-4 * second
    rounds = [
        {0: first, 1: nearly, 3: second},
        {1: nearly, 2: first, 3: second},
        {0: first, 3: second},
    ]
    form = {"closure": "none", "cluster_size": "seen", "similarity": "mean"}
    strategy = strategy_of(**form, transitive=transitive)
    last = steps_of(strategy, memory_grid, rounds, [1, 1, 1, 1])[-1]
    np.testing.assert_allclose(last, (first / size + second) / (1 / size + 1), atol=1e-6)


@pytest.mark.parametrize("closure", ["full", "one-step", "none"])
def test_a_chain_of_four_has_clusters_of_the_closures_sizes(closure):
    chain, everyone = (np.array([0, 1, 2]), np.array([1, 2, 3])), np.arange(4)
    sizes = cluster_sizes(np.zeros(4, dtype=np.int64), [chain], closure, everyone, everyone)
    expected = {"full": [4, 4, 4, 4], "one-step": [3, 4, 4, 3], "none": [2, 3, 3, 2]}
    assert sizes.tolist() == expected[closure]


def test_the_threshold_follows_its_settings():
    eps = 0.5
    for t in range(8):
        assert threshold(t + 1, 0.5, 1.1, 0.9) == pytest.approx(eps)
        eps = min(eps * 1.1**t, 0.9)
    assert eps == 0.9
