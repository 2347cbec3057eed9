"""A process outlives many runs: each reads what is on disk, and keeps to what it has read."""

import json
import shutil

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from PIL import Image
from safetensors.torch import save_file

from flwr_distill.client.auxiliary import auxiliary_of
from flwr_distill.client.features import kept_features
from flwr_distill.client.local_round import build_model
from flwr_distill.client.session import Session
from flwr_distill.task.file_state import FilesChangedError
from flwr_distill.task.models import create_model, model_of

PRIVATE = {"dataset": "private", "private.shape": "1x4x4"}


def images(number, seed):
    return np.random.default_rng(seed).integers(1, 255, (number, 4, 4), dtype=np.uint8)


def class_folders(root, version):
    """Two classes; the second time they have each other's names."""
    shutil.rmtree(root, ignore_errors=True)
    for place, name in enumerate(("ant", "bee") if version == 1 else ("bee", "ant")):
        (root / name).mkdir(parents=True)
        for number, image in enumerate(images(5, seed=place)):
            Image.fromarray(image).save(root / name / f"{number}.png")
    return {"data": str(root)}, {**PRIVATE, "private.classes": "ant,bee"}


def withdrawn_image(root, version):
    """Ten images; the second time one of them is gone."""
    own = class_folders(root, 1)
    if version == 2:
        (root / "bee" / "3.png").unlink()
    return own


def npz(root, version):
    """Ten images; the second time with other labels, in a file of the same size."""
    root.mkdir(exist_ok=True)
    labels = np.arange(10) % 2 if version == 1 else 1 - np.arange(10) % 2
    np.savez(root / "own.npz", images=images(10, 0), labels=labels)
    return {"data": str(root / "own.npz")}, {**PRIVATE, "private.num-classes": 2}


def part(root, halves, **run_config):
    """One of two parts, by an index file: the library of the other schemes takes long to import."""
    file = root / "split.json"
    file.write_text(json.dumps(dict(enumerate(halves))))
    node = {"partition-id": 0, "num-partitions": 2, "data-root": str(root)}
    return node, {"partition.scheme": "index-file", "partition.index-file": str(file), **run_config}


def csv(root, version):
    """A table; the second time the names of its columns have moved."""
    root.mkdir(exist_ok=True)
    order = [0, 1, 2] if version == 1 else [1, 2, 0]
    rows = np.random.default_rng(0).normal(size=(20, 3))
    lines = [",".join(f"{value:.3f}" for value in row) for row in rows]
    text = "".join(f"{line},k{number % 2}\n" for number, line in enumerate(lines))
    for name in ("train", "test"):
        (root / f"{name}.csv").write_text(",".join(f"c{i}" for i in order) + ",label\n" + text)
    return part(root, [[*range(10)], [*range(10, 20)]], dataset="csv")


def tsv(root, version):
    """Twenty texts; the second time with other labels."""
    root.mkdir(exist_ok=True)
    labels = [(number + version) % 2 for number in range(20)]
    text = "".join(f"{label}\tword{number}\n" for number, label in enumerate(labels))
    for name in ("train", "dev"):
        (root / f"{name}.tsv").write_text("label\tsentence\n" + text)
    return part(root, [[*range(10)], [*range(10, 20)]], dataset="sst-2")


def index_file(root, version):
    """A split of the digits; the second time it is the other way round."""
    root.mkdir(exist_ok=True)
    halves = [list(range(50)), list(range(50, 100))]
    return part(root, halves if version == 1 else halves[::-1])


def own_set(root, version):
    """A data set of the node's own, by name; the second time it has other images."""
    (root / "usps").mkdir(parents=True, exist_ok=True)
    for name in ("train", "test"):
        digits = np.random.default_rng(version).integers(1, 255, (10, 16, 16), dtype=np.uint8)
        np.savez(root / "usps" / f"{name}.npz", images=digits, labels=np.arange(10))
    return {"dataset": "usps", "data-root": str(root)}, {**PRIVATE, "private.num-classes": 10}


KINDS = [class_folders, withdrawn_image, npz, csv, tsv, index_file, own_set]


@pytest.fixture
def session(tmp_path):
    """The session of a node in a run, all in this process."""

    def session(node, run_config, run_id):
        node = {"state-dir": str(tmp_path / "state"), "device": "cpu", **node}
        return Session.of(Context(run_id, 5, node, RecordDict(), run_config))

    return session


def same(one, other):
    pairs = ((one.train, other.train), (one.holdout, other.holdout))
    return one.spec == other.spec and all(
        torch.equal(a.inputs, b.inputs) and torch.equal(a.labels, b.labels) for a, b in pairs
    )


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_warm_node_reads_what_is_on_disk_when_a_run_begins(session, tmp_path, kind):
    first = session(*kind(tmp_path / "data", 1), run_id=1).data
    again = session(*kind(tmp_path / "data", 2), run_id=2).data
    fresh = session(*kind(tmp_path / "copy", 2), run_id=3).data  # in a path that nothing has read
    assert not (len(first.train) == len(fresh.train) and same(first, fresh))
    assert same(again, fresh)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_change_during_a_run_is_an_error_that_names_the_files(session, tmp_path, kind):
    own = kind(tmp_path / "data", 1)
    began = session(*own, run_id=1).data
    kind(tmp_path / "data", 2)
    for _ in range(2):
        with pytest.raises(FilesChangedError, match=str(tmp_path / "data")):
            session(*own, run_id=1)
    kind(tmp_path / "data", 1)  # the remedy
    assert same(session(*own, run_id=1).data, began)


def test_a_run_that_is_resumed_keeps_to_what_it_has_read(session, tmp_path):
    own = npz(tmp_path / "data", 1)
    session(*own, run_id=1)
    npz(tmp_path / "data", 2)
    resumed = session(*own, run_id=2)
    resumed.store.take_over("1", "5", 1)
    with pytest.raises(FilesChangedError):
        session(*own, run_id=2)


def test_files_that_are_copied_or_touched_with_the_same_content_disturb_no_run(session, tmp_path):
    own = class_folders(tmp_path / "data", 1)
    began = session(*own, run_id=1).data
    (tmp_path / "data" / "ant" / "0.png").touch()
    (tmp_path / "data" / ".hidden").touch()
    shutil.copytree(tmp_path / "data", tmp_path / "new")
    shutil.rmtree(tmp_path / "data")
    (tmp_path / "new").rename(tmp_path / "data")
    assert same(session(*own, run_id=1).data, began)


def test_cached_features_are_those_of_the_images_on_disk(session, tmp_path):
    def features(root, version, run_id):
        node, config = own_set(root, version)
        node |= {"state-dir": str(tmp_path / f"state of {root.name}")}
        within = session(node, {**config, "model": "random-features"}, run_id)
        return kept_features(within, within.data.train.inputs)

    features(tmp_path / "data", 1, run_id=1)
    again = features(tmp_path / "data", 2, run_id=2)
    np.testing.assert_array_equal(again, features(tmp_path / "copy", 2, run_id=3))


def test_an_auxiliary_set_is_read_again_for_another_run_and_keeps_to_it_within_one(
    session, tmp_path
):
    def read(seed, run_id):
        np.savez(tmp_path / "public.npz", images=images(20, seed))
        return auxiliary_of(session(*npz(tmp_path / "data", 1), run_id), file, 10)

    file = str(tmp_path / "public.npz")
    first, second = read(0, run_id=1), read(1, run_id=2)
    assert not torch.equal(first, second)
    with pytest.raises(FilesChangedError, match=r"public\.npz"):
        read(1, run_id=1)
    assert torch.equal(read(0, run_id=1), first)


def test_a_file_of_weights_that_changes_during_a_run_is_an_error_that_names_it(session, tmp_path):
    file = tmp_path / "network.safetensors"

    def built(seed):
        draws = torch.Generator().manual_seed(seed)
        network = create_model("random-features", session_of_run.data.spec).network
        state = network.state_dict()
        waves = torch.randn(state["waves"].shape, generator=draws)
        save_file({"waves": waves, "phases": torch.zeros_like(state["phases"])}, file)
        within = session({"partition-id": 0, "num-partitions": 10}, config, run_id=1)
        own = model_of(within.task, within.data.spec)
        return build_model(within, {n: value.numpy() for n, value in own.state_dict().items()})

    session_of_run = session({"partition-id": 0, "num-partitions": 10}, {}, run_id=2)
    config = {"model": "random-features", "backbone.weights": str(file)}
    waves = built(0).network.waves
    with pytest.raises(FilesChangedError, match=r"network\.safetensors"):
        built(1)
    assert torch.equal(built(0).network.waves, waves)
