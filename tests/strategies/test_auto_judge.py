"""Auto judges models by what nodes hold out, each class alike, however much a node claims."""

from collections import defaultdict

import numpy as np
import pytest
from flwr.app import Message, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from flwr_distill.strategies.auto.judge import class_weights, held_out_accuracy

NODES = (11, 12, 13, 14)


def evaluations(accuracies, samples):
    """Replies of nodes that hold out so many samples, and find a model so accurate."""
    return [
        Message(
            RecordDict(
                {"metrics": MetricRecord({"num-examples": size, "eval-accuracy": accuracy})}
            ),
            reply_to=Message(RecordDict(), node, "evaluate"),
        )
        for node, accuracy, size in zip(NODES, accuracies, samples, strict=False)
    ]


def test_a_node_counts_for_no_more_held_out_samples_than_it_has():
    replies = evaluations((1.0, 0.0), (10**9, 10))
    assert held_out_accuracy(replies, {NODES[0]: 30}, {}) == (0.75, 40)


@pytest.mark.parametrize("last", [(0, 1), (2,)])
def test_classes_count_alike_however_many_samples_nodes_hold_out_of_them(last):
    accuracies, sizes, classes = (0.9, 0.8, 0.1, 0.2), (40, 80, 10, 30), [(0, 1), (1,), (2,), last]
    held = dict(zip(NODES, classes, strict=True))
    accuracy, certainty = held_out_accuracy(evaluations(accuracies, sizes), {}, held)
    of_class = defaultdict(list)  # accuracy and samples of each node that has the class
    for right, size, labels in zip(accuracies, sizes, classes, strict=True):
        for label in labels:
            of_class[label].append((right, size / len(labels)))
    each = [np.average([r for r, _ in n], weights=[w for _, w in n]) for n in of_class.values()]
    assert accuracy == pytest.approx(np.mean(each))
    assert certainty < sum(sizes)


@given(st.lists(st.integers(1, 500), min_size=4, max_size=4))
def test_nodes_with_the_same_classes_count_by_their_samples(sizes):
    weights = class_weights(np.array(sizes, dtype=float), [(0, 1)] * 4)
    np.testing.assert_allclose(weights, np.array(sizes) / sum(sizes))


def test_where_a_node_does_not_say_its_classes_samples_count():
    replies = evaluations((1.0, 0.0, 0.0, 0.0), (30, 10, 10, 10))
    held = dict.fromkeys(NODES[:3], (0,))
    assert held_out_accuracy(replies, {}, held) == (0.5, pytest.approx(60))


def test_one_node_that_alone_has_a_class_makes_the_comparison_less_certain():
    replies = evaluations((0.5, 0.5, 0.5, 0.5), (100, 100, 100, 2))
    held = dict(zip(NODES, [(0,), (0,), (0,), (1,)], strict=True))
    assert held_out_accuracy(replies, {}, held)[1] < 8
