"""Messages are decoded as Flower decodes them, in less memory and within bounds."""

import tracemalloc

import flwr.app.message.array as array_module
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as of_numpy

from flwr_distill.flower.inflating import InflationError, inflated
from flwr_distill.flower.pulls import arrays_within

ARRAYS = of_numpy.arrays(
    st.sampled_from([np.float32, np.int64, np.uint8]), of_numpy.array_shapes(max_side=4)
)
MOST = 10**9


def encoded(content):
    message = Message(content, 5, "train")
    objects = get_all_nested_objects(message)
    return message.object_id, {name: part.deflate() for name, part in objects.items()}


@given(arrays=st.lists(ARRAYS, max_size=4), chunk=st.integers(1, 200))
def test_a_message_is_decoded_as_flower_decodes_it(arrays, chunk):
    """Also where arrays, or their chunks, are equal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(array_module, "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", chunk)
        records = {"a": ArrayRecord(arrays + arrays[:1]), "b": ArrayRecord(arrays)}
        others = {"m": MetricRecord({"n": 1}), "c": ConfigRecord({"b": b"ArrayChunk"})}
        name, contents = encoded(RecordDict({**records, **others}))
        flowers = inflatable_utils.inflate_object_from_contents(name, dict(contents))
        ours = inflated(name, contents, MOST)
        assert not contents
        assert ours.content == flowers.content == RecordDict({**records, **others})
        assert ours.object_id == flowers.object_id == name


@given(victim=st.integers(0, 5), place=st.integers(0, 10**6), instead=st.binary(max_size=3))
def test_changed_objects_are_an_error_or_within_the_bound(victim, place, instead):
    array = Array(np.arange(100, dtype=np.float32))
    name, contents = encoded(RecordDict({"a": ArrayRecord({"w": array, "v": array})}))
    victim = list(contents)[victim % len(contents)]
    content = bytearray(contents[victim])
    content[place % len(content) : place % len(content) + 1] = instead
    contents[victim] = bytes(content)
    try:
        message = inflated(name, contents, 2000)
    except Exception:  # any is an answer
        return
    sizes = {id(each): len(each.data) for each in message.content["a"].values()}
    assert sum(sizes.values()) <= 2000


def test_each_byte_is_in_memory_once_and_a_large_array_twice_while_it_is_joined():
    model = [np.full(1_500_000, value, np.float32) for value in range(10)]
    name, contents = encoded(RecordDict({"a": ArrayRecord(model)}))
    size = sum(map(len, contents.values()))
    tracemalloc.start()
    try:
        message = inflated(name, contents, MOST)
        _, more = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(message.content["a"]) == 10
    assert more < 1.1 * size  # what was before is not traced, and goes as this comes


def test_flowers_own_decoding_is_bounded_within_the_block_alone():
    name, contents = encoded(RecordDict({"a": ArrayRecord([np.zeros(1000), np.ones(1000)])}))

    def decode():
        return inflatable_utils.inflate_object_from_contents(name, dict(contents))

    with arrays_within(20_000):
        assert decode().object_id == name
    with arrays_within(10_000), pytest.raises(InflationError):  # both together
        decode()
    assert decode().object_id == name


@pytest.mark.parametrize("kind", ["Array", "ArrayRecord", "RecordDict"])
@pytest.mark.parametrize("claimed", [5, None])
def test_long_lists_are_not_read_whatever_length_they_claim(kind, claimed):
    """JSON of 6 MB would take 150."""
    body = ('{"arraychunk_ids": [], "x": [' + "{}," * 2_000_000 + "{}]}").encode()
    name, contents = encoded(RecordDict({"a": ArrayRecord([np.zeros(3)])}))
    (victim,) = (n for n, content in contents.items() if content.startswith(f"{kind} ".encode()))
    head = contents[victim].partition(b"\0")[0].rpartition(b" ")[0]
    length = len(body) if claimed is None else claimed
    contents[victim] = head + f" {length}".encode() + b"\0" + body
    tracemalloc.start()
    try:
        with pytest.raises(InflationError):
            inflated(name, contents, MOST)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2e7
