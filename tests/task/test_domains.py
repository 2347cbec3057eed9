"""Nodes that hold different data sets: each brought to the run's images, with its own test set."""

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict

from flwr_distill.client.session import Session
from flwr_distill.task.datasets import (
    Dataset,
    DatasetError,
    DataSpec,
    RawSamples,
)
from flwr_distill.task.datasets.images import fit_samples
from flwr_distill.task.settings import TaskSettings
from flwr_distill.task.source import data_spec, domain, reserved_samples
from tests.errors import at

RUN = {"dataset": "private", "private.shape": "3x16x12"}
SPEC = DataSpec("run", (3, 16, 12), 10, (0.5,) * 3, (0.5,) * 3)
PRIVATE = TaskSettings.from_run_config(RUN)


def test_grey_pixels_become_equal_channels_and_edges_stay_in_place():
    image = np.zeros((1, 1, 8, 6), np.uint8)
    image[..., :3] = 200
    fitted = fit_samples(RawSamples(image, np.array([3])), SPEC)
    assert fitted.images.shape == (1, 3, 16, 12)
    assert (fitted.images == fitted.images[:, :1]).all()
    assert (fitted.images[..., :4] == 200).all()
    assert (fitted.images[..., 8:] == 0).all()
    assert fitted.labels.tolist() == [3]


def test_a_domain_has_all_training_samples_or_one_part_and_always_all_test_samples():
    whole = domain(PRIVATE, "digits", None)
    parts = [domain(PRIVATE, "digits", (i, 3)) for i in range(3)]
    assert len(whole.train) == 1437
    assert {len(part.test) for part in parts} == {len(whole.test)} == {360}
    assert max(len(part.train) for part in parts) < len(whole.train)
    assert whole.train.images.shape[1:] == (3, 16, 12)


@pytest.mark.parametrize("part", [None, (0, 1)])
def test_no_node_gets_reserved_samples_whether_it_has_a_part_or_all(part):
    task = TaskSettings.from_run_config({"dataset": "digits", "partition.reserved": 100})
    spec = data_spec(task)
    kept = reserved_samples(task, spec, 100).inputs
    own = domain(task, "digits", part).train.to_samples(spec).inputs
    assert len(own) == 1337
    assert not {row.numpy().tobytes() for row in kept} & {row.numpy().tobytes() for row in own}


def test_a_node_trains_on_its_data_set_and_is_tested_on_that_sets_test_samples(tmp_path):
    node = {"dataset": "digits", "state-dir": str(tmp_path), "device": "cpu"}
    session = Session.of(Context(1, 5, node, RecordDict(), RUN))
    assert (len(session.data.train), len(session.data.holdout)) == (1437, 360)
    expected = domain(PRIVATE, "digits", None).test.to_samples(session.data.spec)
    assert torch.equal(session.data.holdout.inputs, expected.inputs)
    assert session.data.spec.shape == (3, 16, 12)


def too_many_classes(root, download):
    spec = DataSpec("odd", (1, 8, 8), 12, (0.5,), (0.5,))
    samples = RawSamples(np.zeros((2, 1, 8, 8), np.uint8), np.array([0, 11]))
    return Dataset(spec, samples, samples)


def test_a_domain_with_labels_beyond_the_runs_is_refused(monkeypatch):
    monkeypatch.setattr(
        "flwr_distill.task.datasets.registry.import_object", lambda name: too_many_classes
    )
    with pytest.raises(DatasetError, match="labels run from 0 to 11"):
        domain(PRIVATE, "mine:odd", None)


def test_a_domain_of_tables_is_refused(tmp_path):
    for part in ("train", "test"):
        (tmp_path / f"{part}.csv").write_text("a,label\n1,x\n2,y\n")
    with pytest.raises(DatasetError, match="table", check=at("dataset of this node", value="csv")):
        domain(PRIVATE, "csv", None, str(tmp_path))
