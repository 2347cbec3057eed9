"""Checkpoints give back what they were given, and nothing else is taken for one."""

import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from safetensors.numpy import save, save_file

from flwr_distill.server.record import checkpoint as module
from flwr_distill.server.record.checkpoint import (
    FORMAT,
    Checkpoint,
    CheckpointError,
    Checkpoints,
    PackedCheckpoint,
    checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from flwr_distill.server.record.packing import PackingError, pack, renamed, unpack
from tests.errors import at

NODE = 2**64 - 1000

keys = st.text(max_size=5) | st.integers(0, 2**64)
some_arrays = st.sampled_from([np.float32, np.int64, np.uint8, np.bool_]).flatmap(
    lambda dtype: st_numpy.arrays(dtype, st_numpy.array_shapes(min_dims=0, max_dims=3, max_side=3))
)
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=9)
    | some_arrays
)
data = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=12,
)


def assert_equal(found, wanted):
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)  # order is part of a state
        for key in wanted:
            assert_equal(found[key], wanted[key])
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_equal(one, other)
    elif isinstance(wanted, np.ndarray):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_array_equal(found, wanted)
    else:
        assert found == wanted


@given(data)
def test_packing_by_way_of_json_changes_nothing(value):
    arrays = {}
    packed = json.loads(json.dumps(pack(value, arrays)))
    assert_equal(unpack(packed, arrays), value)


@pytest.mark.parametrize(
    ("value", "where", "problem"),
    [
        ({"state": [1, object()]}, "/state/1", "a object cannot"),
        ({(1, 2): 3}, "", "a tuple as a key"),
        ({"w": ArrayRecord({"a": Array(np.array(["x"]))})}, "/w", "not an array of numbers"),
    ],
)
def test_what_cannot_be_kept_is_named(value, where, problem):
    with pytest.raises(PackingError, match=problem, check=at(where)):
        pack(value, {})


def test_tuples_and_sets_become_lists_and_tensors_arrays_and_records_stay():
    arrays, record = {}, ArrayRecord({"w": torch.arange(3.0)})
    value = {"a": (1, 2), "b": {3, 1}, "c": torch.ones(2), "d": np.int64(4), "e": record}
    found = unpack(pack(value, arrays), arrays)
    assert (found["a"], found["b"], found["c"].tolist(), found["d"]) == ([1, 2], [1, 3], [1, 1], 4)
    assert isinstance(found["e"], ArrayRecord)
    assert found["e"]["w"].numpy().tolist() == [0, 1, 2]


def test_node_ids_are_renamed_wherever_they_stand_and_nothing_else_is():
    state = {"places": {NODE: 0, NODE + 1: 1}, "away": [NODE + 1], "count": 1, "on": True}
    names = {NODE: 5, NODE + 1: 6, 1: 99}
    expected = {"places": {5: 0, 6: 99}, "away": [6], "count": 99, "on": True}
    assert renamed(state, names) == expected


def checkpoint(server_round=3, **changed):
    content = {
        "run_id": 2**63 + 5,
        "round": server_round,
        "settings": {"train": {"lr": 0.1}},
        "nodes": {NODE: "0"},
        "arrays": ArrayRecord({"w": torch.arange(4.0)}),
        "state": {"clusters": [{"nodes": [NODE]}], "m": {"w": np.ones(4)}},
        "record": {"rows": []},
    }
    return Checkpoint(**{**content, **changed})


def test_a_checkpoint_gives_back_the_run(tmp_path):
    file = save_checkpoint(tmp_path, checkpoint())
    found = load_checkpoint(file)
    assert (found.run_id, found.round, found.nodes) == (2**63 + 5, 3, {NODE: "0"})
    assert found.settings == {"train": {"lr": 0.1}}
    assert found.arrays["w"].numpy().tolist() == [0, 1, 2, 3]
    assert_equal(found.state, {"clusters": [{"nodes": [NODE]}], "m": {"w": np.ones(4)}})


def test_what_others_have_put_beside_checkpoints_ends_no_run_and_stays(tmp_path):
    """A copy by another name, and what file systems and notebooks leave there."""
    first = save_checkpoint(tmp_path, checkpoint())
    copy = first.with_name("round-000003-good.safetensors")
    copy.write_bytes(first.read_bytes())
    (hidden := first.with_name(".ipynb_checkpoints")).mkdir()
    (leftover := first.with_name(f".{first.name}.0123abcd")).touch()
    last = save_checkpoint(tmp_path, checkpoint(4), keep=1)
    assert checkpoints(tmp_path) == {4: last}
    assert (copy.exists(), hidden.exists(), leftover.exists()) == (True, True, False)


def test_the_same_run_gives_the_same_bytes(tmp_path):
    files = [save_checkpoint(tmp_path / name, checkpoint()) for name in "ab"]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("interrupted", [3, 4])
def test_a_write_that_breaks_off_leaves_the_checkpoint_before_it_and_no_other(
    tmp_path, monkeypatch, interrupted, keep
):
    kept = save_checkpoint(tmp_path, checkpoint(3))
    content = kept.read_bytes()

    def half_of_it(arrays, file, metadata):
        whole = save(arrays, metadata)
        Path(file).write_bytes(whole[: len(whole) // 2])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "save_file", half_of_it)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, checkpoint(interrupted, run_id=7), keep)
    assert list(kept.parent.iterdir()) == [kept]  # a full disk gets its room back
    (kept.parent / ".round-000004.safetensors.1234").write_bytes(b"left by a kill")
    assert checkpoints(tmp_path) == {3: kept}
    assert kept.read_bytes() == content
    again = save_checkpoint(tmp_path, checkpoint(interrupted, run_id=7), keep)
    assert load_checkpoint(again).run_id == 7
    assert set(kept.parent.iterdir()) == set(checkpoints(tmp_path).values())


def test_a_checkpoint_gets_its_name_when_all_of_it_is_on_the_disk(tmp_path, monkeypatch):
    synced, named = {}, []
    fsync, replace = os.fsync, os.replace

    def noting_fsync(descriptor):
        fsync(descriptor)
        about = os.fstat(descriptor)
        synced[about.st_ino] = about.st_size

    def noting_replace(source, target):
        about = os.stat(source)
        named.append((synced.get(about.st_ino), about.st_size, target))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "replace", noting_replace)
    file = save_checkpoint(tmp_path, checkpoint())
    size = file.stat().st_size
    assert named == [(size, size, file)]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_only_the_last_and_the_best_stay(tmp_path, keep):
    for server_round in range(6):
        save_checkpoint(tmp_path, checkpoint(server_round), keep, best=min(server_round, 1))
    kept = checkpoints(tmp_path)
    assert list(kept) == [1, *range(6 - keep, 6)]
    assert all(load_checkpoint(file).round == number for number, file in kept.items())


def test_a_foreign_file_is_no_checkpoint(tmp_path):
    model = tmp_path / "model.safetensors"
    save_file({"w": np.ones(3)}, model)
    with pytest.raises(CheckpointError, match="but not a checkpoint", check=at(model)):
        load_checkpoint(model)


def test_any_cut_or_changed_byte_is_noticed(tmp_path):
    file = save_checkpoint(tmp_path, checkpoint())
    content = file.read_bytes()
    for place in range(0, len(content), 7):
        for damaged in (content[:place], bytes([*content[:place], content[place] ^ 1])):
            file.write_bytes(damaged + content[len(damaged) :] * (len(damaged) > place))
            with pytest.raises(CheckpointError):
                load_checkpoint(file)


@pytest.mark.parametrize("other", [FORMAT - 1, FORMAT + 1])
def test_another_format_is_refused_with_the_version_to_take(tmp_path, monkeypatch, other):
    monkeypatch.setattr(module, "FORMAT", other)
    file = save_checkpoint(tmp_path, checkpoint())
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=f"of format {other},", check=at(file)):
        load_checkpoint(file)


@pytest.fixture
def disk(monkeypatch):
    """An event without which no checkpoint is written."""
    save, ready = PackedCheckpoint.save, threading.Event()

    def waiting(*args):
        assert ready.wait(30)
        return save(*args)

    monkeypatch.setattr(PackedCheckpoint, "save", waiting)
    yield ready
    ready.set()


def test_a_round_ends_before_its_checkpoint_is_on_disk_and_the_next_after_that(disk, tmp_path):
    hook = Checkpoints(tmp_path, 2, lambda: None)
    hook.on_checkpoint(checkpoint(0))
    assert not checkpoints(tmp_path)
    threading.Timer(0.2, disk.set).start()
    hook.on_checkpoint(checkpoint(1))
    assert 0 in checkpoints(tmp_path)
    hook.on_run_end(None)
    assert list(checkpoints(tmp_path)) == [0, 1]


def test_a_checkpoint_is_the_state_at_its_round_whatever_changes_while_it_is_written(
    disk, tmp_path
):
    state = {"momentum": np.zeros(3)}
    hook = Checkpoints(tmp_path, 2, lambda: None)
    hook.on_checkpoint(checkpoint(0, state=state))
    state["momentum"] += 1
    disk.set()
    hook.on_run_end(None)
    saved = load_checkpoint(checkpoints(tmp_path)[0]).state
    assert saved["momentum"].tolist() == [0, 0, 0]


def test_an_edges_checkpoint_is_on_disk_before_its_round_ends(tmp_path):
    hook = Checkpoints(tmp_path, 2, lambda: None, at_once=True)
    hook.on_checkpoint(checkpoint(0))
    assert 0 in checkpoints(tmp_path)


def test_a_checkpoint_that_cannot_be_written_ends_the_run(monkeypatch, tmp_path):
    def full(*args, **named):
        raise OSError(28, "no space")

    monkeypatch.setattr(module, "save_file", full)
    hook = Checkpoints(tmp_path, 2, lambda: None)
    hook.on_checkpoint(checkpoint(0))
    with pytest.raises(OSError, match="no space"):
        hook.on_checkpoint(checkpoint(1))


def test_a_model_is_packed_without_a_copy_of_it():
    record, arrays = ArrayRecord({"w": Array(np.arange(6.0))}), {}
    pack({"model": record}, arrays)
    (packed,) = arrays.values()
    assert np.shares_memory(packed, np.frombuffer(record["w"].data, np.uint8))
