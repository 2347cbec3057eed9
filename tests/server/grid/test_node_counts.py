"""Counts of held-out samples of all nodes together: whose count, and how much one that lies moves.

The oracle is scikit-learn, on the samples themselves, weighted as nodes count.
"""

import numpy as np
import pytest
import torch
from flwr.app import MetricRecord, RecordDict
from sklearn.metrics import balanced_accuracy_score, f1_score

from benchmarks.in_process import FIRST_NODE, InProcessGrid
from flwr_distill.protocol.counts import COUNTS, counts_record
from flwr_distill.protocol.outliers import ORDINARY
from flwr_distill.server.grid.node_counts import NodeCounts
from flwr_distill.strategies.common.directory import Directory
from flwr_distill.task.evaluation import add_counts
from flwr_distill.task.scores import Counts, size
from tests.grids import messages_to, screening_grid

CLASSES = 3


def held_out(number, seed):
    """Logits and labels of a node's held-out samples."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(number) % CLASSES
    logits = torch.randn(number, CLASSES, generator=generator)
    logits[torch.arange(number), labels] += 1
    return logits, labels


def counts_of(logits, labels):
    total = torch.zeros(size(CLASSES), dtype=torch.int64)
    add_counts(total, logits, labels)
    return Counts.from_vector(total.numpy(), CLASSES)


def evaluating(counts, times=1):
    """A node whose evaluation has these counts, and so many times as many samples as that."""
    counts = Counts(*(times * part for part in counts.parts()))
    numbers = {
        "num-examples": counts.samples,
        "eval-accuracy": float(counts.confusion.trace() / counts.samples),
    }
    content = {"metrics": MetricRecord(numbers), COUNTS: counts_record(counts)}
    return lambda message: RecordDict(dict(content))


def scores_of_all(nodes, training, most_samples=10.0):
    """What a run records of all nodes together; `training` are samples that they have claimed."""
    by_id = {FIRST_NODE + place: node for place, node in enumerate(nodes)}
    directory = Directory(most_samples=most_samples)
    directory.num_examples |= dict(zip(by_id, training, strict=True))
    counts = NodeCounts(CLASSES, wanted=True)
    grid = screening_grid(InProcessGrid(by_id), directory=directory, counts=counts)
    grid.send_and_receive(messages_to(by_id, "evaluate"))
    return counts.summary(0)


def weighted(samples, weights):
    """The metrics of samples of several nodes, each with its node's weight, by scikit-learn."""
    labels = np.concatenate([own.numpy() for _, own in samples])
    predicted = np.concatenate([logits.argmax(1).numpy() for logits, _ in samples])
    each = np.repeat(weights, [len(own) for _, own in samples])
    return {
        "accuracy": np.average(predicted == labels, weights=each),
        "balanced_accuracy": balanced_accuracy_score(labels, predicted, sample_weight=each),
        "macro_f1": f1_score(labels, predicted, average="macro", sample_weight=each),
    }


@pytest.mark.parametrize("most_samples", [10.0, 0.0])
def test_a_node_with_far_more_samples_counts_as_far_as_others_claims_allow(most_samples):
    sizes = (20, 30, 40, 2000)
    samples = [held_out(number, seed) for seed, number in enumerate(sizes)]
    nodes = [evaluating(counts_of(*own)) for own in samples]
    found = scores_of_all(nodes, [9 * number for number in sizes], most_samples)
    assert found["nodes"] == 4
    # one robust deviation of the logarithms above the median of the claims, the lower one
    logs = np.log(sizes)
    spread = np.exp(1.4826 * np.median(np.abs(logs - np.median(logs))))
    limit = int(max(spread, ORDINARY) * 30) if most_samples else 2000
    expected = weighted(samples, [1, 1, min(1, limit / 40), limit / 2000])
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert found["samples"] == 50 + min(40, limit) + limit
    low, high = found["intervals"]["accuracy"]
    assert low < found["accuracy"] < high


def test_nodes_that_hold_out_more_than_they_train_on_have_their_counts():
    samples = [held_out(90, seed) for seed in range(3)]
    found = scores_of_all([evaluating(counts_of(*own)) for own in samples], [10, 10, 10])
    assert (found["nodes"], found["samples"]) == (3, 270)
    assert found["accuracy"] == pytest.approx(weighted(samples, [1, 1, 1])["accuracy"])


@pytest.mark.parametrize("times", [9, 10**9])
def test_a_node_that_claims_any_number_of_samples_moves_metrics_by_little_more_than_its_share(
    times,
):
    samples = [held_out(60, seed) for seed in range(5)]
    labels = samples[0][1]
    lie = counts_of(10.0 * torch.eye(CLASSES)[(labels + 1) % CLASSES], labels)  # all wrong
    nodes = [evaluating(lie, times), *(evaluating(counts_of(*own)) for own in samples[1:])]
    honest = weighted(samples[1:], [1] * 4)["accuracy"]
    found = scores_of_all(nodes, [540] * 5)
    share = ORDINARY / (ORDINARY + 4)
    assert found["accuracy"] == pytest.approx((1 - share) * honest)
