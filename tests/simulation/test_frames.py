"""Frames carry a message's content from process to process, bit by bit."""

import resource
import socket

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from flwr_distill.protocol.arrays import as_arrays
from flwr_distill.simulation.dataset import write_dataset
from flwr_distill.simulation.frames import (
    Frame,
    SharedArrays,
    SharedMemoryError,
    decode_content,
    encode_content,
)
from flwr_distill.task.datasets import load_dataset
from flwr_distill.task.source import ReadDataset

KEYS = st.text(min_size=1, max_size=8)
TYPES = st.sampled_from(["float32", "float64", "float16", "int64", "uint8", "bool"])
VALUES = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8"), max_size=9)
    | st.binary(max_size=9)
    | st.lists(st.binary(max_size=5), max_size=3)
    | st.lists(st.integers(-9, 9), max_size=3)
)
ARRAYS = TYPES.flatmap(
    lambda kind: arrays(kind, array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)
RECORDS = (
    st.dictionaries(KEYS, VALUES, max_size=4).map(ConfigRecord)
    | st.dictionaries(KEYS, st.integers(-9, 9) | st.floats(allow_nan=False)).map(MetricRecord)
    | st.dictionaries(KEYS, ARRAYS, max_size=3).map(
        lambda d: ArrayRecord({name: Array(values) for name, values in d.items()})
    )
)


@given(st.dictionaries(KEYS, RECORDS, max_size=4))
def test_content_arrives_as_it_was_sent(tmp_path_factory, records):
    folder, content, blobs = tmp_path_factory.mktemp("shared"), RecordDict(records), bytearray()
    encoded = encode_content(content, SharedArrays(folder, "a").write, blobs)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Frame({"content": encoded}, blobs).send(ours, folder)
        frame = Frame.receive(theirs, folder)
    read = SharedArrays(folder, "b").read
    received = decode_content(frame.header["content"], read, frame.blobs)
    assert list(received) == list(content)
    for name, record in content.items():
        assert type(received[name]) is type(record)
        assert list(received[name]) == list(record)
        if isinstance(record, ArrayRecord):
            for own, other in zip(as_arrays(record).values(), received[name].values(), strict=True):
                assert (own.dtype, own.shape) == (other.values.dtype, other.values.shape)
                np.testing.assert_array_equal(own, other.values)
        else:
            assert {k: (type(v), v) for k, v in received[name].items()} == {
                k: (type(v), v) for k, v in record.items()
            }


def test_a_file_that_was_deleted_keeps_its_arrays_for_who_has_mapped_it(tmp_path):
    shared = SharedArrays(tmp_path, "a")
    written = shared.write(ArrayRecord({"x": Array(np.arange(5.0))}))
    arrays = shared.read(written)
    shared.delete(written["file"])
    assert not list(tmp_path.iterdir())
    assert arrays["x"].values.tolist() == [0, 1, 2, 3, 4]


@pytest.fixture
def full():
    """Files have room for 10 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("full")
def test_nothing_stays_of_what_there_is_no_room_for(tmp_path):
    with pytest.raises(SharedMemoryError, match=str(tmp_path)):
        SharedArrays(tmp_path, "a").write(ArrayRecord({"x": Array(np.zeros(2_000))}))
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(SharedMemoryError, match=str(tmp_path)):
        Frame({}, bytearray(40_000)).send(ours, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("full")
def test_a_data_set_for_which_the_room_was_taken_meanwhile_is_not_shared(tmp_path):
    own = ReadDataset(("digits", "", True, None), b"state", load_dataset("digits"))
    assert write_dataset(own, SharedArrays(tmp_path, "a"), tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_nobody_writes_into_a_model_that_others_see(tmp_path):
    shared = SharedArrays(tmp_path, "a")
    arrays = shared.read(shared.write(ArrayRecord({"x": Array(np.arange(5.0))})))
    with pytest.raises(ValueError, match="read-only"):
        arrays["x"].values[0] = 1


def test_frames_of_any_size_pass_while_nobody_reads(tmp_path):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sizes = [0, 10, 40_000, 10_000_000]
        for size in sizes:
            Frame({"size": size}, bytearray(size)).send(ours, tmp_path)
        frames = [Frame.receive(theirs, tmp_path) for _ in sizes]
    assert [(frame.header["size"], len(frame.blobs)) for frame in frames] == [(n, n) for n in sizes]
    assert not list(tmp_path.iterdir())


def test_the_end_of_the_other_side_is_an_error(tmp_path):
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(b"\x01")
    with ours, pytest.raises(EOFError):
        Frame.receive(ours, tmp_path)
