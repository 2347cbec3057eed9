"""What a resumed run learns and how stays as it was; how long and where may change."""

import json
import os

import pytest
from flwr.app import ArrayRecord

from flwr_distill.server.page.run_files import flat
from flwr_distill.server.record.checkpoint import Checkpoint, CheckpointError, save_checkpoint
from flwr_distill.server.record.resume import checkpoint_to_resume, find_run_to_resume
from flwr_distill.server.settings import RunSettings
from tests.errors import at

MAY_CHANGE = {
    "data-root": "elsewhere",
    "download": True,
    "edge": "/tmp/socket",
    "hooks": "my_pkg.tally:Tally",
    "keep-checkpoints": 5,
    "links": "relay",
    "min-nodes": 3,
    "num-rounds": 20,
    "phase-timeout": 60.0,
    "queue-id": "name",
    "quorum": 0.5,
    "server-device": "cpu",
    "simulation.together": "off",
    "patience-failed": 3,
}
OTHERS = {
    "dataset": "cifar10",
    "model": "mlp",
    "partition.scheme": "dirichlet",
    "partition.clusters": "2:1",
    "partition.index-file": "split.json",
    "private.shape": "1x8x8",
    "private.classes": "cat,dog",
    "private.columns": "age,sex:f|m",
    "private.label": "ill",
    "partition.samples": "10",
    "train.kd-kernel": "centred",
    "train.on": "virtual",
    "down-codec": "int8",
    "up-codec": "topk",
    "train.optimizer": "adam",
    "train.lr-schedule": "cosine",
    "train.precision": "tf32",
    "train.augment": "auto",
    "train.feature-layer": "fc",
    "train.class-weights": "1,2",
    "best-metric": "auroc",
    "strategy": "fedavg",
    "start": "analytic",
    "backbone.fourier": 32,
    "backbone.network": "timm:resnet18",
    "backbone.interpolation": "bicubic",
    "backbone.mean": "0.5",
    "backbone.std": "0.5",
    "backbone.trains": "all",
    "backbone.weights": "weights.safetensors",
    "strategy-args": '{"beta": 0.2}',
    "aggregator": "krum",
    "aggregator-args": '{"num_malicious_nodes": 1}',
    "defence": "on",
    "hfldd.distiller": "dm",
    "hfldd.heads": "all",
    "evaluate.model": "model.safetensors",
    "hfldd.start": "class-stats",
    "hfldd.auxiliary": "fashion-mnist",
    "hfldd.network": "my_pkg.nets:Encoder",
    "hfldd.network-weights": "encoder.safetensors",
    "fedseq-zaccone.auxiliary": "fashion-mnist",
    "fedmd.auxiliary": "fashion-mnist",
    "fedhead.average": "logits",
    "fedhead.reference": "fashion-mnist",
    "fedhead.rule": "agreement",
    "analytic.head": "lda",
    "cadis.most-say": 3.0,
    "cadis.aggregation": "samples",
    "cadis.rule": "agreement",
    "cadis.closure": "one-step",
    "cadis.cluster-size": "seen",
    "cadis.rescaling": "positive",
    "cadis.similarity": "mean",
    "cadis.transitive": "all",
    "fedlgd.image-optimizer": "sgd",
    "fedlgd.match": "update",
    "fedlgd.means-of": "classes",
    "fedlgd.regulariser": "mmd",
    "fedlgd.starts-from": "noise",
    "dp-adaptive.clipped-count-stddev": 2.0,
    "vhl.images": "stylegan",
    "virtual.image-optimizer": "sgd",
    "virtual.means-of": "classes",
    "virtual.starts-from": "noise",
}
FIRST = {"train.dp-noise": 1.0, "hfldd.start": "noise"}
"""Of the run as it began: without these no budget can be set."""
NETWORK = {"hfldd.distiller": "dm", "hfldd.network": "my_pkg.nets:Encoder"}
PRETRAINED = {"backbone.network": "timm:resnet18"}
TOGETHER = {
    **{f"backbone.{key}": PRETRAINED for key in ("interpolation", "mean", "size", "std")},
    **{"hfldd.network": NETWORK, "hfldd.network-weights": NETWORK},
    "hfldd.votes": {"hfldd.rotate": False, "hfldd.complete-clusters": False},
    "evaluate.model": {"num-rounds": 0},
    "fedlgd.dp-epsilon": {"fedlgd.refine-steps": 0},
    "statistics": {"num-rounds": 0},
    "partition.max-samples": {"partition.test-share": 0.2},
    "private.columns": {"private.classes": "no,yes"},
    "train.on": {"train.dp-noise": 0.0},
}
"""What a setting needs beside it."""
BEGAN_WITH = flat(RunSettings.from_run_config(FIRST).model_dump(by_alias=True))
FIXED = sorted(BEGAN_WITH.keys() - MAY_CHANGE.keys() - {"resume", "runs-dir"})


def another(key):
    """A value that the setting may have, and had not."""
    value = BEGAN_WITH[key]
    if key in OTHERS:
        return OTHERS[key]
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else value / 2 or 0.25


def settings_with(**changed):
    return RunSettings.from_run_config({**FIRST, **changed})


def leave_checkpoint(folder, number=1, settings=None):
    """Leave the checkpoint of a round of a run; the run's id is its folder's name."""
    settings = settings or settings_with().model_dump(by_alias=True)
    checkpoint = Checkpoint(int(folder.name), number, settings, {}, ArrayRecord(), {}, {"data": ""})
    return save_checkpoint(folder, checkpoint)


@pytest.fixture
def go_on(tmp_path):
    """Take up a run that is over its first round, with other settings."""

    def go_on(without=(), **changed):
        settings = settings_with().model_dump(by_alias=True)
        for table, key in without:
            del settings[table][key]
        leave_checkpoint(tmp_path / "1", settings=settings)
        settings = settings_with(**{"runs-dir": str(tmp_path), "resume": "1", **changed})
        folder = find_run_to_resume(settings, run_id=2)
        return folder, checkpoint_to_resume(settings, folder)

    return go_on


@pytest.mark.parametrize("key", FIXED)
def test_a_setting_of_what_is_learnt_cannot_change_in_the_middle_of_a_run(go_on, key):
    with pytest.raises(CheckpointError, check=at("resume", value="1")) as error:
        go_on(**TOGETHER.get(key, {}) | {key: another(key)})
    then, now = repr(BEGAN_WITH[key]), repr(another(key))
    assert f"{key} = {then} then, {now} now" in error.value.problem


@pytest.mark.parametrize("key", MAY_CHANGE)
def test_a_setting_of_how_long_and_where_may_change(go_on, tmp_path, key):
    assert MAY_CHANGE[key] != BEGAN_WITH[key]
    folder, found = go_on(**{key: MAY_CHANGE[key]})
    assert (folder, found.round) == (tmp_path / "1", 1)


def test_all_settings_that_differ_are_named_at_once(go_on):
    with pytest.raises(CheckpointError, match=r"seed = 0 then, 1 now; train\.lr = 0\.05 then, 0"):
        go_on(**{"seed": 1, "train.lr": 0.1})


def test_a_setting_that_is_newer_than_the_run_was_at_its_default(go_on):
    newer = [("fedlgd", "match"), ("cadis", "kd-lambda")]
    _, found = go_on(without=newer)
    assert found.round == 1
    with pytest.raises(CheckpointError, match=r"fedlgd.match = 'gradient' then, 'update' now"):
        go_on(without=newer, **{"fedlgd.match": "update"})


def test_the_latest_run_is_the_one_that_started_last_whatever_the_times_of_its_files(tmp_path):
    for run_id, hour, written in (("1", 10, 300), ("2", 12, 100), ("3", 11, 200)):
        for number in (1, 2):
            file = leave_checkpoint(tmp_path / run_id, number)
            os.utime(file, (written + number, written + number))  # as after a copy
        (tmp_path / run_id / "settings.json").write_text("{}")
        started = json.dumps({"started": f"2026-01-01T{hour}:00:00+00:00"})
        (tmp_path / run_id / "about.json").write_text(started)
    settings = settings_with(**{"runs-dir": str(tmp_path), "resume": "latest"})
    folder = find_run_to_resume(settings, run_id=9)
    found = checkpoint_to_resume(settings, folder)
    assert (folder.name, found.run_id, found.round) == ("2", 2, 2)


def test_latest_resumes_no_older_run_because_the_last_has_no_checkpoint(tmp_path):
    leave_checkpoint(tmp_path / "1")
    (tmp_path / "2").mkdir()
    for run_id, written in (("1", 100), ("2", 200)):
        (tmp_path / run_id / "journal.jsonl").touch()
        os.utime(tmp_path / run_id / "journal.jsonl", (written, written))
    settings = settings_with(**{"runs-dir": str(tmp_path), "resume": "latest"})
    with pytest.raises(CheckpointError, match="run 2", check=at("resume", value="latest")):
        find_run_to_resume(settings, run_id=9)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("12", None),
        ("123", None),
        ("1", "1 begins 2 ids: 123, 145"),
        ("9", "no run 9"),
    ],
)
def test_a_run_is_named_by_its_first_digits(tmp_path, given, said):
    for run_id in ("145", "123"):
        leave_checkpoint(tmp_path / run_id)
    (tmp_path / "99").mkdir()  # broke off before its first checkpoint
    settings = settings_with(**{"runs-dir": str(tmp_path), "resume": given})
    if said is None:
        assert find_run_to_resume(settings, run_id=2).name == "123"
    else:
        with pytest.raises(CheckpointError, match=said, check=at("resume", value=given)):
            find_run_to_resume(settings, run_id=2)
