"""Whatever stands in a file, it is a checkpoint or refused."""

import json
from contextlib import suppress

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save

from server.record.checkpoint import (
    FORMAT,
    KEY,
    Checkpoint,
    CheckpointError,
    load_checkpoint,
    save_checkpoint,
)
from server.record.packing import unpack

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
    file = file.with_name("damaged.safetensors")
    file.write_bytes(data)
    with suppress(CheckpointError):
        assert isinstance(load_checkpoint(file), Checkpoint)


@FUZZ
@given(st.binary(max_size=300))
def test_random_bytes(good, data):
    read(good, data)


@FUZZ
@given(st.data())
def test_a_damaged_checkpoint(good, data):
    read(good, data.draw(damaged(good.read_bytes())))


@FUZZ
@given(JSON, JSON)
def test_another_header(good, header, content):
    arrays = load_file(good)
    forged = {"format": FORMAT, "sha256": "", "content": json.dumps(content)}
    for told in (header, forged):
        read(good, save(arrays, metadata={KEY: json.dumps(told)}))


@FUZZ
@given(JSON)
def test_packed_data_are_unpacked_or_refused(packed):
    with suppress(KeyError, TypeError, ValueError):
        unpack(packed, {"0": np.zeros(3)})
