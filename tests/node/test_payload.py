"""What executor and worker hand each other in files, of which one end may be a hostile app's."""

import json
import os
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from flwr_distill.flower.inflating import InflationError
from flwr_distill.flower.payload import Payload
from flwr_distill.node import payload
from flwr_distill.node.payload import PayloadError, PayloadFile


@pytest.fixture(scope="module")
def file():
    made = PayloadFile.create()
    yield made
    made.close()


def forge(file, content):
    os.ftruncate(file.fileno(), 0)
    os.pwrite(file.fileno(), content, 0)


def with_sizes(sizes, rest=b""):
    text = json.dumps(sizes).encode()
    return rest + text + len(text).to_bytes(8, "big")


@given(parts=st.lists(st.binary()))
def test_parts_arrive_as_they_were_put_and_once(file, parts):
    file.put(parts)
    assert file.take() == parts
    with pytest.raises(PayloadError):
        file.take()


def test_a_file_on_disk_does_where_there_is_none_in_memory(monkeypatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    made = PayloadFile.create()
    made.put([b"a", b"b" * 100_000])
    assert made.take() == [b"a", b"b" * 100_000]
    made.close()
    made.close()  # a second time closes no other file


def test_one_process_cannot_move_the_other_ones_place(file):
    file.put([b"abc"])
    os.lseek(file.fileno(), 7, os.SEEK_SET)
    assert file.take() == [b"abc"]


@given(content=st.binary())
def test_bytes_that_are_no_parts_are_an_error_and_leave_nothing(file, content):
    forge(file, content)
    with pytest.raises(PayloadError):
        file.take()
    assert os.fstat(file.fileno()).st_size == 0


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"\xff" * 8, id="sizes without end"),
        pytest.param(with_sizes([3]), id="missing"),
        pytest.param(with_sizes([3], b"abcd"), id="too much"),
        pytest.param(with_sizes([-1, 4], b"abc"), id="negative"),
        pytest.param(with_sizes([True], b"a"), id="no number"),
        pytest.param(with_sizes([1 << 60]), id="huge"),
        pytest.param(with_sizes({"3": 3}, b"abc"), id="no list"),
        pytest.param(b"[" * 50_000 + (50_000).to_bytes(8, "big"), id="deep"),
    ],
)
def test_sizes_that_do_not_fit_are_an_error(file, content):
    forge(file, content)
    with pytest.raises(PayloadError):
        file.take()


def test_more_than_is_allowed_is_not_read(file, monkeypatch):
    monkeypatch.setattr(payload, "MAX_BYTES", 1000)
    file.put([b"x" * 1000])
    with pytest.raises(PayloadError, match="over 1,000"):
        file.take()


@pytest.fixture(scope="module")
def context():
    state = RecordDict({"mine": ConfigRecord({"n": 3})})
    return Context(7, 5, {"device": "cpu"}, state, {"train.lr": 0.1}, 7)


def test_a_message_and_its_context_arrive(file, context):
    content = RecordDict({"model": ArrayRecord({}), "config": ConfigRecord({"round": 2})})
    message = Message(content, 5, "train")
    sent = Payload.of(message, context)
    file.put(sent.parts())
    arrived = Payload.from_parts(file.take())
    assert arrived.message().content == content
    assert arrived.message().metadata.message_id == sent.name == message.object_id
    assert (arrived.context.state, arrived.context.run_config) == (
        context.state,
        context.run_config,
    )
    assert arrived.num_bytes == sent.num_bytes


def test_a_message_is_encoded_piece_by_piece_and_its_contents_go_as_they_are_decoded(file, context):
    arrays = ArrayRecord([np.full(1000, value, np.float32) for value in range(3)])
    message = Message(RecordDict({"model": arrays}), 5, "train")
    sent = Payload.of(message, context)
    with patch.object(Array, "deflate", autospec=True, side_effect=Array.deflate) as encoded:
        file.put(sent.parts())
    assert encoded.call_count == 3, "they were encoded before, and all kept"
    arrived = Payload.from_parts(file.take())
    assert arrived.message(keep=False).content == message.content
    assert not arrived.contents


@given(parts=st.lists(st.binary() | st.sampled_from([b'["a", ["b"], {}]', b'["a", [], {}]', b""])))
def test_parts_that_are_no_payload_are_an_error(parts):
    with pytest.raises(Exception):  # noqa: B017, PT011 (Flower's decoding raises any)
        Payload.from_parts(parts).message()


def test_more_parts_than_a_message_has_objects_are_not_read(file):
    forge(file, with_sizes([0] * (payload.MAX_PARTS + 1)))
    with pytest.raises(PayloadError, match="parts, over"):
        file.take()


def test_a_head_that_names_more_than_any_message_has_is_not_read(context):
    head, *others = Payload.of(Message(RecordDict(), 5, "train"), context).parts()
    with pytest.raises(PayloadError, match="head"):
        Payload.from_parts([head + b" " * (16 << 20), *others])


def test_an_array_that_names_a_chunk_again_and_again_is_not_decoded(context):
    """A megabyte would become a terabyte in the node's executor."""
    array = Array(np.zeros(250_000, np.float32))
    message = Message(RecordDict({"model": ArrayRecord({"w": array})}), 5, "train")
    sent = Payload.of(message, context)
    assert sent.message().content == message.content
    (name,) = (n for n, content in sent.contents.items() if content.startswith(b"Array "))
    head, body = sent.contents[name].split(b"\0", 1)
    grown = json.dumps({**json.loads(body), "arraychunk_ids": [0] * 10_000}).encode()
    forged = head.rpartition(b" ")[0] + b" " + str(len(grown)).encode() + b"\0" + grown
    with pytest.raises(InflationError, match="arrays of over"):
        replace(sent, contents={**sent.contents, name: forged}).message()
    longer = json.dumps({**json.loads(body), "arraychunk_ids": [0] * 400_000}).encode()
    forged = head.rpartition(b" ")[0] + b" " + str(len(longer)).encode() + b"\0" + longer
    with pytest.raises(InflationError, match="list of"):
        replace(sent, contents={**sent.contents, name: forged}).message()


def test_a_message_without_its_objects_is_an_error(context):
    sent = Payload.of(Message(RecordDict(), 5, "train"), context)
    lost = Payload(sent.name, {}, context, {})
    with pytest.raises(KeyError):
        lost.message()
