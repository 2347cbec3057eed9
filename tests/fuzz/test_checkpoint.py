"""Whatever stands in a file, it is a checkpoint or refused."""

import hashlib
import json
from contextlib import suppress
from dataclasses import fields

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save

from flwr_distill.server.record.checkpoint import (
    FORMAT,
    KEY,
    Checkpoint,
    CheckpointError,
    load_checkpoint,
    save_checkpoint,
)
from flwr_distill.server.record.packing import pack, unpack

from .conftest import FUZZ, JSON, damaged


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """File of a checkpoint."""
    checkpoint = Checkpoint(
        run_id=2**63 + 1,
        round=3,
        settings={"strategy": "hfldd", "train": {"lr": 0.1}},
        nodes={2**64 - 1: "0", 5: "1"},
        arrays=ArrayRecord({"w": Array(np.arange(6.0))}),
        state={"strategy": "HFLDD", "known": [1, (2, b"x")], "h": np.ones((2, 2))},
        record={"rows": []},
    )
    return save_checkpoint(tmp_path_factory.mktemp("run"), checkpoint)


def read(file, data):
    """The checkpoint that stands in a file with these bytes; None if they are refused."""
    file = file.with_name("damaged.safetensors")
    file.write_bytes(data)
    with suppress(CheckpointError):
        return load_checkpoint(file)
    return None


def content(checkpoint):
    assert isinstance(checkpoint, Checkpoint)
    arrays = {}
    values = {field.name: getattr(checkpoint, field.name) for field in fields(checkpoint)}
    return pack(values, arrays), {name: array.tolist() for name, array in arrays.items()}


@FUZZ
@given(st.binary(max_size=300))
def test_random_bytes(good, data):
    assert read(good, data) is None


@FUZZ
@given(st.data())
def test_a_damaged_checkpoint_is_the_one_that_was_written_or_refused(good, data):
    original = good.read_bytes()
    found = data.draw(st.just(original) | damaged(original))
    checkpoint = read(good, found)
    if checkpoint is None:
        assert found != original
    else:
        assert content(checkpoint) == content(load_checkpoint(good))


def test_what_was_written_is_read_and_a_changed_weight_is_refused(good):
    original = good.read_bytes()
    assert read(good, original) is not None
    weight = original.index(np.array(4.0).tobytes())
    assert read(good, original[:weight] + b"\x01" + original[weight + 1 :]) is None


@FUZZ
@given(JSON, JSON)
def test_another_header(good, header, content):
    arrays, text = load_file(good), json.dumps(content)
    parts = [text.encode(), *(arrays[name].tobytes() for name in sorted(arrays))]
    digest = hashlib.sha256(b"".join(parts)).hexdigest()
    forged = {"format": FORMAT, "sha256": "", "content": text}
    for metadata in (header, forged, forged | {"sha256": digest}):
        assert read(good, save(arrays, metadata={KEY: json.dumps(metadata)})) is None


def test_what_bears_its_checksum_is_read_up_to_its_content(good):
    with safe_open(good, framework="numpy") as opened:
        header = json.loads(opened.metadata()[KEY])
    arrays = load_file(good)
    same = read(good, save(arrays, metadata={KEY: json.dumps(header)}))
    assert content(same) == content(load_checkpoint(good))


@FUZZ
@given(JSON)
def test_packed_data_are_unpacked_or_refused(packed):
    with suppress(KeyError, TypeError, ValueError):
        unpack(packed, {"0": np.zeros(3)})
