"""What a node may say of its classes, and how the server takes the mean of it."""

import numpy as np
import pytest

from flwr_distill.protocol.arrays import as_record
from flwr_distill_baselines.common.class_means import class_means, mean_by_class, record_of_means

HONEST = {
    "classes": np.array([1, 4]),
    "counts": np.array([3, 5]),
    "means": np.ones((2, 6), np.float32),
}


def read(width=6, num_classes=5, **changed):
    arrays = {name: a for name, a in {**HONEST, **changed}.items() if a is not None}
    return class_means(as_record(arrays), {"means": width}, num_classes)


def test_an_honest_record_is_read_with_and_without_knowing_its_form():
    for arrays in (read(), read(width=None, num_classes=None)):
        assert arrays["classes"].tolist() == [1, 4]
        assert arrays["means"].shape == (2, 6)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"counts": None}, "its arrays are not classes, counts, means"),
        ({"odd": np.ones(2)}, "its arrays are not classes, counts, means"),
        ({"classes": np.array([4, 1])}, "not distinct labels in order"),
        ({"classes": np.array([1, 1])}, "not distinct labels in order"),
        ({"classes": np.array([-1, 1])}, "not distinct labels in order"),
        ({"classes": np.array([-(2**63), 2**63 - 1])}, "not distinct labels in order"),
        ({"classes": np.array([1, 5])}, "it has class 5, and there are 5"),
        ({"classes": np.array([1, 2**62])}, "it has class"),
        ({"classes": np.array([1.0, 4.0])}, "its classes are float64"),
        ({"classes": np.array([[1, 4]])}, "its classes are int64"),
        ({"classes": np.array([], np.int64)}, "its classes are int64"),
        ({"classes": np.array(1)}, "its classes are int64"),
        ({"counts": np.array([3, 0])}, "not numbers of samples"),
        ({"counts": np.array([3, -5])}, "not numbers of samples"),
        ({"counts": np.array([3, 2**62])}, "not numbers of samples"),
        ({"counts": np.array([3.0, 5.0])}, "its counts are float64"),
        ({"counts": np.array([3])}, "its counts are int64"),
        ({"means": np.ones((2, 7), np.float32)}, "its means are float32"),
        ({"means": np.ones((3, 6), np.float32)}, "its means are float32"),
        ({"means": np.ones((2, 6))}, "its means are float64"),
        ({"means": np.float32(1)}, "its means are float32"),
        ({"means": np.full((2, 6), np.nan, np.float32)}, "means holds NaN or infinity"),
        ({"means": np.full((2, 6), np.inf, np.float32)}, "means holds NaN or infinity"),
    ],
)
def test_anything_else_is_refused(changed, said):
    with pytest.raises(ValueError, match=said):
        read(**changed)


@pytest.mark.parametrize("means", [np.ones((2, 0)), np.ones(2), np.ones((2, 3, 2)), np.float32(1)])
def test_means_are_rows_of_values_even_if_their_number_is_unknown(means):
    with pytest.raises(ValueError, match="its means are float32"):
        read(width=None, means=means.astype(np.float32))


def test_the_mean_of_a_class_weighs_nodes_by_their_samples_of_it():
    def of(classes, counts, values):
        rows = np.array(values, np.float32)[:, None]
        return {"classes": np.array(classes), "counts": np.array(counts), "means": rows}

    sent = [(8.0, of([0, 1], [2, 6], [1, 2])), (4.0, of([1], [4], [7]))]
    means = mean_by_class(sent, "means")
    assert {label: mean.tolist() for label, mean in means.items()} == {0: [1.0], 1: [4.0]}


def test_a_node_weighs_as_its_samples_that_count_whatever_it_says_of_its_classes():
    def weight(claimed):
        liar = {"classes": np.array([0, 1]), "counts": np.array(claimed)}
        liar["means"] = np.ones((2, 1), np.float32)
        honest = {"classes": np.array([0]), "counts": np.array([10])}
        honest["means"] = np.zeros((1, 1), np.float32)
        return float(mean_by_class([(10.0, liar), (10.0, honest)], "means")[0][0])

    assert weight([5, 5]) == pytest.approx(1 / 3)
    assert weight([5 * 10**14, 5 * 10**14]) == pytest.approx(1 / 3)
    assert weight([10**15, 1]) == pytest.approx(1 / 2)


def test_the_servers_record_has_its_classes_in_order():
    means = {4: np.array([4.0], np.float32), 1: np.array([1.0], np.float32)}
    record = record_of_means(means=means, others=means)
    assert record["classes"].numpy().tolist() == [1, 4]
    assert record["others"].numpy().tolist() == [[1.0], [4.0]]
