"""Codecs of arrays: bounds of what they lose, and bytes that are none."""

import math
import tracemalloc

import numpy as np
import pytest
import zstandard
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from flwr_distill.protocol.arrays import as_arrays, as_record
from flwr_distill.protocol.codecs import CODECS, TOP_LEVELS, TOP_SHARE, CodecError
from flwr_distill.protocol.coded import PREFIX, coded, decoded, unchanged, version_of

VALUES = arrays(
    np.float32,
    array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6),
    elements=st.floats(-1e4, 1e4, width=32, allow_subnormal=False),
)


def steps(values, most):
    """The largest error of an integer codec: a step of each channel."""
    rows = (
        values.reshape(len(values), math.prod(values.shape[1:]))
        if values.ndim > 1
        else values.reshape(1, values.size)
    )
    scales = np.abs(rows).max(axis=1, initial=0, keepdims=True) / most
    return np.broadcast_to(scales, rows.shape).reshape(values.shape)


ERROR = {
    "float16": lambda values: np.abs(values) * 2**-11 + 2**-24,
    "bfloat16": lambda values: np.abs(values) * 2**-8,
    "int8": lambda values: steps(values, 127) * 1.001,
    "int4": lambda values: steps(values, 7) * 1.001,
}


@pytest.mark.parametrize("name", ERROR)
@given(values=VALUES)
def test_no_value_is_further_off_than_the_codec_promises(name, values):
    codec = CODECS[name]
    got = codec.unpack(codec.pack(values, np.random.default_rng(0)), values.shape)
    assert got.shape == values.shape
    assert got.dtype == np.float32
    assert (np.abs(got - values) <= ERROR[name](values)).all()


@given(values=VALUES)
def test_topk_keeps_the_largest_values_and_no_others(values):
    codec = CODECS["topk"]
    got = codec.unpack(codec.pack(values, np.random.default_rng(0)), values.shape)
    kept, most = got != 0, math.ceil(TOP_SHARE * values.size)
    assert kept.sum() <= most
    half_a_level = np.abs(values).max(initial=0) / TOP_LEVELS / 2 * 1.001
    assert np.abs(got - values)[kept].max(initial=0) <= half_a_level
    amounts = np.sort(np.abs(values), axis=None)[::-1]
    assert np.abs(values)[kept].min(initial=np.inf) >= amounts[:most].min(initial=np.inf)
    assert kept.sum() >= (amounts[:most] > half_a_level).sum()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_random_rounding_is_right_on_average(name):
    values = np.linspace(-1, 1, 101, dtype=np.float32)
    rng, codec = np.random.default_rng(0), CODECS[name]
    mean = np.mean(
        [codec.unpack(codec.pack(values, rng), values.shape) for _ in range(400)], axis=0
    )
    assert np.abs(mean - values).max() < 5 * ERROR[name](values)[0] / math.sqrt(400)


@pytest.mark.parametrize("name", CODECS)
@given(packed=st.binary(max_size=60), size=st.integers(0, 300))
def test_bytes_that_are_no_array_are_an_error(name, packed, size):
    for content in (packed, zstandard.compress(packed)):
        try:
            got = CODECS[name].unpack(content, (size,))
        except CodecError:
            continue
        assert got.shape == (size,)


def test_a_bomb_is_not_unpacked():
    bomb = zstandard.compress(bytes(10**8))
    for codec in CODECS.values():
        with pytest.raises(CodecError):
            codec.unpack(bomb, (1000,))


def test_arrays_that_nothing_bounds_unpack_to_a_few_times_their_bytes():
    """Else a node that packs zeros fills the memory of a server."""
    zeros = {"w": np.zeros((1000, 1000), np.float32)}
    record, _ = coded(as_record(zeros), "exact", np.random.default_rng(0))
    assert not record["w"].stype.startswith(PREFIX)
    packed = CODECS["exact"].pack(zeros["w"], np.random.default_rng(0))
    hostile = Array("float32", (1000, 1000), f"{PREFIX}exact", packed)
    tracemalloc.start()
    for start in ({}, None, zeros):
        with pytest.raises(CodecError, match="allowed"):
            decoded(ArrayRecord({"w": hostile}), start)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < zeros["w"].nbytes / 10


@given(values=VALUES)
def test_exact_packing_is_exact(values):
    codec = CODECS["exact"]
    packed = codec.pack(values, np.random.default_rng(0))
    assert codec.unpack(packed, values.shape).tobytes() == values.tobytes()


def model(**more):
    rng = np.random.default_rng(1)
    return {
        "w": rng.standard_normal((32, 40)).astype(np.float32),
        "b": rng.standard_normal(32).astype(np.float32),
        "bn.running_var": rng.random(600).astype(np.float32),
        "bn.num_batches_tracked": np.array(3),
        "double": rng.standard_normal(600),
        **more,
    }


@pytest.mark.parametrize("name", CODECS)
def test_small_arrays_statistics_and_integers_stay_exact(name):
    start = model()
    trained = {key: array + array.dtype.type(1) for key, array in start.items()}
    record, _ = coded(as_record(trained), name, np.random.default_rng(0), start)
    assert [key for key, array in record.items() if array.stype.startswith(PREFIX)] == ["w"]
    got = as_arrays(decoded(record, start))
    for key in trained.keys() - {"w"}:
        np.testing.assert_array_equal(got[key], trained[key])


def test_what_topk_leaves_out_comes_later():
    """Its rests and what it sends add up to what training changed."""
    start, rng = model(), np.random.default_rng(0)
    sent, rest = np.zeros((32, 40), np.float32), {}
    for turn in range(1, 6):
        trained = {**start, "w": start["w"] + np.float32(0.1) * start["w"]}
        record, rest = coded(as_record(trained), "topk", rng, start, rest)
        sent += as_arrays(decoded(record, start))["w"] - start["w"]
        np.testing.assert_allclose(sent + rest["w"], turn * 0.1 * start["w"], atol=1e-5)


def test_the_model_that_a_node_has_is_sent_as_names_alone():
    record = unchanged(model())
    assert sum(len(array.data) for array in record.values()) == 0
    got = as_arrays(decoded(record, model()))
    assert all((got[key] == array).all() for key, array in model().items())


def test_values_that_are_not_finite_are_sent_as_they_are():
    broken = model(w=np.full((32, 40), np.nan, np.float32))
    record, _ = coded(as_record(broken), "int8", np.random.default_rng(0), model())
    assert np.isnan(as_arrays(record)["w"]).all()


@pytest.mark.parametrize(
    "array",
    [
        Array("float32", (40, 32), PREFIX + "int8", b"x"),
        Array("float64", (32, 40), PREFIX + "int8", b"x"),
        Array("float32", (32, 40), PREFIX + "int9", b"x"),
        Array("float32", (32, 40), PREFIX + "int8", b"x"),
    ],
    ids=["shape", "type", "codec", "bytes"],
)
def test_a_coded_array_unlike_the_sent_model_is_an_error(array):
    with pytest.raises(CodecError, match=r"^w"):
        decoded(ArrayRecord({"w": array}), model())


@pytest.mark.parametrize(
    ("name", "place", "byte"),
    [
        ("int4", -1, 14 * 15 + 8),  # one value, and a step in the place of a second
        ("topk", 4, 0b1000_0011),  # bits of a sixth value and beyond
        ("topk", 4, 0b1111_1000),  # three values are sent, not two
    ],
)
def test_bytes_hold_nothing_beside_the_values(name, place, byte):
    codec, shape = CODECS[name], (5,)
    values = np.float32([0, 0, 0, 0.5, 1])
    raw = bytearray(zstandard.decompress(codec.pack(values, np.random.default_rng(0))))
    raw[place] = byte
    with pytest.raises(CodecError):
        codec.unpack(zstandard.compress(bytes(raw)), shape)


@pytest.mark.parametrize(
    ("name", "share"),
    [("float16", 0.43), ("bfloat16", 0.36), ("int8", 0.22), ("int4", 0.094), ("topk", 0.0275)],
)
def test_normally_distributed_values_take_this_share_of_their_bytes(name, share):
    rng = np.random.default_rng(0)
    channels = rng.lognormal(0, 1, (256, 1))
    values = (channels * rng.standard_normal((256, 4608))).astype(np.float32)
    packed = CODECS[name].pack(values, rng)
    assert len(packed) / values.nbytes == pytest.approx(share, rel=0.05)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("shape", [(10**8, 0), (-1, -3), (2**70, 0), (0,), (3,)])
def test_an_array_that_may_not_be_coded_is_not_unpacked(name, shape):
    """Of int8 with 10^8 channels of no values, the scales alone would be 400 MB."""
    packer = zstandard.ZstdCompressor().compressobj(size=4 * 10**8)
    zeros = bytes(10**6)
    packed = b"".join([*(packer.compress(zeros) for _ in range(400)), packer.flush()])
    record = ArrayRecord({"w": Array("float32", shape, f"{PREFIX}{name}", packed)})
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            decoded(record)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1e6


@pytest.mark.parametrize(("name", "value"), [("float16", 7e4), ("bfloat16", 3.4e38)])
def test_values_beyond_a_codecs_largest_are_sent_as_they_are(name, value):
    model = as_record({"w": np.full(300, value, np.float32)})
    record, _ = coded(model, name, np.random.default_rng(0))
    assert record["w"] is model["w"]


def test_models_of_other_names_shapes_or_types_have_other_hashes():
    zeros = np.zeros((2, 6), np.float32)
    others = [{"a": zeros}, {"b": zeros}, {"a": zeros.reshape(3, 4)}, {"a": zeros.view(np.int32)}]
    others += [{"a": zeros[:1], "b": zeros[1:]}]
    assert len({version_of(arrays) for arrays in others}) == len(others)


def test_a_models_hash_is_of_its_values_however_these_lie_in_memory():
    values = np.arange(12, dtype=np.float32)
    for own in (values[::2], values[::-1], values.reshape(3, 4).T, values[:0], values[3]):
        array = np.asarray(own)
        assert version_of({"a": array}) == version_of({"a": array.copy("C")})
