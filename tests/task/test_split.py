"""A data set that is split again into training and test samples."""

import numpy as np
import pytest

from flwr_distill.task.datasets import Dataset, DatasetError, DataSpec, RawSamples, load_dataset
from flwr_distill.task.datasets.split import split_again
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.settings import TaskSettings
from flwr_distill.task.source import partition_samples, server_data
from tests.errors import at


def numbered(train, test, classes=2):
    """Samples whose pixel is their place in the data set."""
    spec = DataSpec("some-set", (1, 1, 1), classes, (0.0,), (1.0,))
    places = np.arange(train + test)
    samples = RawSamples(places.astype(np.uint8).reshape(-1, 1, 1, 1), places % classes)
    parts = samples.subset(range(train)), samples.subset(range(train, train + test))
    return Dataset(spec, *parts)


def places(samples):
    return samples.images.flatten().tolist()


def test_both_parts_are_drawn_from_all_samples_within_each_class():
    made = split_again(numbered(80, 20), 0.2, 0, seed=1)
    assert sorted(places(made.train) + places(made.test)) == list(range(100))
    assert np.bincount(made.test.labels).tolist() == [10, 10]
    assert places(made.test) != list(range(80, 100))


def test_the_pool_is_the_first_samples_of_training_and_then_of_test():
    made = split_again(numbered(60, 40), 0.2, 80, seed=1)
    assert sorted(places(made.train) + places(made.test)) == list(range(80))
    assert (len(made.train), len(made.test)) == (64, 16)
    whole = split_again(numbered(60, 40), 0.2, 1000, seed=1)
    assert len(whole.train) + len(whole.test) == 100


def test_equal_seeds_draw_alike_and_others_do_not():
    first, again, other = (
        places(split_again(numbered(80, 20), 0.2, 0, seed).test) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_nodes_train_on_one_part_and_the_server_tests_on_the_other():
    settings = TaskSettings.from_run_config(
        {"partition.test-share": 0.2, "partition.max-samples": 1000}
    )
    tested = server_data(settings).test
    trained = [partition_samples(settings, node, 4) for node in range(4)]
    assert len(tested) + sum(map(len, trained)) == 1000
    seen = {image.tobytes() for part in trained for image in part.images}
    held_twice = {image.tobytes() for image in load_dataset("digits").train.images[:1000]}
    assert len(held_twice) == 1000  # no two are alike, so that parts can be distinguished
    assert seen.isdisjoint(image.tobytes() for image in tested.images)


def test_an_empty_part_is_an_error():
    with pytest.raises(DatasetError, check=at("partition.test-share", value=0.01)):
        split_again(numbered(8, 2), 0.01, 0, seed=0)


def test_a_pool_without_a_share_to_test_on_is_an_error():
    with pytest.raises(SettingsError, check=at("partition.max-samples", value=50)):
        TaskSettings.from_run_config({"partition.max-samples": 50})
