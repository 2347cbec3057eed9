"""Coded models in parcels: what they lose, and bytes that nobody reads."""

import json
import tracemalloc

import numpy as np
import pytest
import zstandard
from flwr.app import ConfigRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

from flwr_distill.protocol.codecs import CODECS, LEVEL, CodecError
from flwr_distill.protocol.messages import PARCEL_CODEC
from flwr_distill.protocol.parcels import (
    ABILITY,
    asked_codec,
    codec_of_changes,
    codec_of_whole,
    coding_record,
    from_payload,
    read_payload,
    to_payload,
)
from flwr_distill.task.errors import SettingsError

NAMES = [
    *("float16", "bfloat16", "delta-float16", "delta-bfloat16", "delta-int8", "delta-int4"),
]
SHARE = {"float16": 2**-10, "bfloat16": 2**-7, "int8": 1 / 100, "int4": 1 / 5}
"""Of the largest value that an error may have."""
MOST = 2**20


def model(seed):
    rng = np.random.default_rng(seed)
    return {
        "w": rng.standard_normal((20, 40), np.float32),
        "b": rng.standard_normal(20, np.float32),
        "bn.running_var": rng.random(300, np.float32),
        "bn.num_batches_tracked": np.array(3),
    }


START = model(0)


def size(arrays):
    return sum(array.nbytes for array in arrays.values())


@pytest.mark.parametrize("codec", NAMES)
@given(seed=st.integers(0, 1000), scale=st.floats(1e-6, 1e3))
def test_a_model_arrives_as_exactly_as_its_codec_says_and_always_as_the_same_bytes(
    codec, seed, scale
):
    trained = {**model(seed), "w": START["w"] + np.float32(scale) * model(seed)["w"]}
    content = to_payload(trained, codec, START)
    assert content == to_payload(trained, codec, START)
    found = from_payload(content, size(trained), START)
    coded = trained["w"] - START["w"] if codec.startswith("delta-") else trained["w"]
    error = SHARE[codec.removeprefix("delta-")] * np.abs(coded).max()
    rounding = 2**-22 * np.abs(trained["w"]).max() + 2**-22 * np.abs(START["w"]).max()
    assert np.abs(found["w"] - trained["w"]).max() <= error + rounding
    for name in trained.keys() - {"w"}:
        np.testing.assert_array_equal(found[name], trained[name])
        assert (found[name].shape, found[name].dtype) == (trained[name].shape, trained[name].dtype)


def test_a_change_counts_for_a_receiver_whose_model_is_another_copy():
    """As of the server's own models: what coding lost on the way there does not come back."""
    trained = {**START, "w": START["w"] + np.float32(0.01)}
    rounded = from_payload(to_payload(START, "float16"), MOST)
    change = from_payload(to_payload(trained, "delta-int8", rounded), MOST, START)["w"]
    np.testing.assert_allclose(change, START["w"] + (trained["w"] - rounded["w"]), atol=2e-4)


def test_a_plain_model_is_the_safetensors_file_that_it_always_was():
    assert to_payload(START, "float32", START) == save(START)
    assert coding_record("float32", [[ABILITY]]) == {}


@pytest.mark.parametrize("codec", NAMES)
@given(data=st.data())
def test_changed_bytes_are_refused_or_are_another_model_in_the_same_form(codec, data):
    content = bytearray(to_payload(model(1), codec, START))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content)))]
    content += data.draw(st.binary(max_size=9))
    try:
        found = from_payload(bytes(content), size(START), START)
    except CodecError:
        return
    assert size(found) <= size(START)


@given(st.binary(max_size=200), st.integers(0, 100))
def test_bytes_that_are_no_model_are_refused(content, length):
    for candidate in (content, length.to_bytes(8, "little") + content):
        try:
            read_payload(candidate, MOST)
        except CodecError:
            continue
        assert save(load(candidate)) == candidate


def written(tensors, coding, **more):
    return save(tensors, {"coded": coding, **more})


def parts_of(codec="delta-int8"):
    """The tensors and the metadata of a coded model."""
    content = to_payload(model(1), codec, START)
    end = 8 + int.from_bytes(content[:8], "little")
    return load(content), json.loads(content[8:end])["__metadata__"]["coded"]


def repacked(change, codec="delta-int8"):
    """A payload whose packed array is changed."""
    tensors, coding = parts_of(codec)
    tensors["w"] = np.frombuffer(change(tensors["w"].tobytes()), np.uint8)
    return written(tensors, coding)


def other_raw(change, codec="delta-int8"):
    """A payload whose array is packed as it must be, of other values."""

    def packed(old):
        raw = bytearray(zstandard.decompress(old))
        change(raw)
        return zstandard.compress(bytes(raw), LEVEL)

    return repacked(packed, codec)


def set_bytes(start, content):
    def change(raw):
        raw[start : start + len(content)] = content

    return change


def zero_scale(raw):
    for plane in range(4):  # of the first scale of 20
        raw[20 * plane] = 0
    raw[80] = 5


def not_finite(raw):
    raw[800], raw[0] = 0x7E, 1  # the upper byte of a float16, then the lower


SKIPPABLE = b"\x50\x2a\x4d\x18\x04\x00\x00\x00name"
HIDDEN = {
    "bytes after a frame": repacked(lambda old: old + b"patients"),
    "a frame to skip": repacked(lambda old: old + SKIPPABLE),
    "another level": repacked(
        lambda old: zstandard.compress(zstandard.decompress(old), -5), "float16"
    ),
    "a checksum": repacked(
        lambda old: zstandard.ZstdCompressor(LEVEL, write_checksum=True).compress(
            zstandard.decompress(old)
        )
    ),
    "steps beyond the codec": other_raw(set_bytes(100, b"\xff"), "delta-int4"),
    "a step of -128": other_raw(set_bytes(100, b"\x80")),
    "steps without a scale": other_raw(zero_scale),
    "a scale that is infinite": other_raw(
        lambda raw: [
            set_bytes(20 * p, b)(raw) for p, b in enumerate((b"\0", b"\0", b"\x80", b"\x7f"))
        ]
    ),
    "NaN": other_raw(not_finite, "float16"),
    "more metadata": written(*parts_of(), patients="x"),
    "other JSON": written(parts_of()[0], parts_of()[1].replace(", ", ",")),
    "a codec that parcels have not": written(parts_of()[0], parts_of()[1].replace("int8", "topk")),
    "whole by steps": written(parts_of()[0], parts_of()[1].replace("delta-", "")),
    "a small array coded": written(
        {"w": np.frombuffer(CODECS["int8"].pack(START["b"], np.random.default_rng(0)), np.uint8)},
        json.dumps(["delta-int8", {"w": [20]}]),
    ),
    "a large one not": written({**parts_of()[0], "v": START["w"]}, parts_of()[1]),
    "a shape of nothing": written({}, json.dumps(["delta-int8", {"w": [20, 40]}])),
    "no shape": written(parts_of()[0], json.dumps(["delta-int8", {"w": [20.0, 40]}])),
    "a negative one": written(parts_of()[0], json.dumps(["delta-int8", {"w": [-20, -40]}])),
    "no metadata of ours": save(parts_of()[0], {"other": ""}),
}


@pytest.mark.parametrize("how", HIDDEN)
def test_what_coding_does_not_write_is_not_read(how):
    """It could hold more than a model."""
    with pytest.raises(CodecError):
        from_payload(HIDDEN[how], MOST, START)


def test_a_model_beyond_the_routes_size_is_not_decoded():
    zeros = {"w": np.zeros((1000, 1000), np.float32)}
    content = to_payload(zeros, "delta-int8", zeros)
    assert from_payload(content, size(zeros), zeros).keys() == zeros.keys()
    claims = written(
        {"w": np.frombuffer(zstandard.compress(bytes(10**8), LEVEL), np.uint8)},
        json.dumps(["float16", {"w": [2**40, 2**40]}]),
    )
    tracemalloc.start()
    for hostile in (content, claims):
        with pytest.raises(CodecError, match="more than the"):
            from_payload(hostile, size(zeros) - 1, zeros)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 * len(content) + 10 * len(claims) + 10**5


@given(st.integers(256, 10**6), st.integers(0, 3))
def test_reading_takes_a_few_times_what_the_route_allows(claimed, more):
    """Whatever size the bytes claim or unpack to."""
    bomb = zstandard.compress(bytes(2 * claimed * 10**more), LEVEL)
    content = written(
        {"w": np.frombuffer(bomb, np.uint8)}, json.dumps(["float16", {"w": [claimed]}])
    )
    tracemalloc.start()
    try:
        from_payload(content, 4 * 10**5)
    except CodecError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 10 * 4 * 10**5


def test_a_difference_to_a_model_that_is_not_there_is_refused():
    content = to_payload(model(1), "delta-int8", START)
    for start in (None, {}, {**START, "w": START["w"][:10]}):
        with pytest.raises(CodecError):
            from_payload(content, MOST, start)


def test_codecs_of_a_run_give_those_of_its_parcels():
    changes = {"float32": "float32", "bfloat16": "delta-bfloat16", "topk": "delta-int4"}
    changes |= {"int8": "delta-int8", "auto": "delta-int8"}
    assert {up: codec_of_changes(up) for up in changes} == changes
    wholes = {"float32": "float32", "delta-bfloat16": "bfloat16", "delta-int4": "float16"}
    wholes |= {"topk": "float16", "auto": "float16"}
    assert {codec: codec_of_whole(codec) for codec in wholes} == wholes
    for codec in {*changes.values(), *wholes.values()} - {"float32"}:
        assert coding_record(codec, [[ABILITY]])


def test_parcels_are_plain_where_one_end_cannot_read_others():
    assert coding_record("delta-int8", [[ABILITY, "int8"], ["int8"]]) == {}
    assert coding_record("delta-int8", [[ABILITY], ["parcels-0-0-1"]]) == {}
    record = coding_record("delta-int8", [[ABILITY], ["int8", ABILITY]])
    assert asked_codec(RecordDict({**record})) == "delta-int8"
    assert asked_codec(RecordDict()) == "float32"
    with pytest.raises(SettingsError):
        asked_codec(RecordDict({PARCEL_CODEC: ConfigRecord({"codec": "int8"})}))


@pytest.mark.parametrize("what", ["metadata", "names"])
def test_a_list_is_read_in_the_memory_of_a_models(what):
    """10 MB of small JSON objects, or of arrays without values, would take hundreds."""
    if what == "metadata":
        text = '["float16", {"w": [' + "{}," * 3_000_000 + "{}]}]"
        content = save({"w": np.zeros(4, np.uint8)}, {"coded": text})
    else:
        empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
        head = json.dumps({str(number): empty for number in range(150_000)}).encode()
        content = len(head).to_bytes(8, "little") + head
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            read_payload(content, MOST)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(content)


@pytest.mark.parametrize("codec", ["float32", "float16", "delta-int4"])
def test_a_shape_that_no_number_holds_is_refused_as_any_other(codec):
    content = save({"w": np.zeros(4, np.uint8)}, {"coded": json.dumps([codec, {"w": [2**70, 0]}])})
    with pytest.raises(CodecError):
        read_payload(content, MOST)
    assert from_payload(to_payload(START, "float32"), MOST)


def test_a_model_beyond_float16_travels_in_full():
    large = {**START, "w": START["w"] * np.float32(1e6)}
    found = from_payload(to_payload(large, "float16"), MOST)
    np.testing.assert_array_equal(found["w"], large["w"])
