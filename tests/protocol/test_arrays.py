"""Arrays that came from elsewhere are decoded once, and with suspicion."""

import math
import tracemalloc

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, RecordDict
from hypothesis import given
from hypothesis.extra.numpy import array_shapes, arrays
from safetensors.numpy import load, save
from torch import nn

from benchmarks.in_process import InProcessGrid
from flwr_distill.protocol.arrays import (
    arrays_of,
    as_arrays,
    as_record,
    check_arrays,
    decode,
    finite_arrays,
    load_arrays,
    model_arrays,
    moved_into_record,
    num_bytes,
    sent_arrays,
)
from flwr_distill.strategies.common.averages import summed_change, weighted_mean


def model(seed):
    rng = np.random.default_rng(seed)
    return {
        "weight": rng.standard_normal((3, 4)).astype(np.float32),
        "steps": np.array(seed),
    }


def reply_with(record):
    message = Message(RecordDict(), 1, "train")
    message.metadata.__dict__.update(_message_id="asked", _src_node_id=1)
    return Message(RecordDict({"arrays": record}), reply_to=message)


class CountedArray(Array):
    """Counts how often its bytes are read."""

    reads = 0

    def __getattribute__(self, name):
        CountedArray.reads += name == "data"
        return super().__getattribute__(name)


@pytest.fixture
def counted():
    """A record of arrays that count how often their bytes are read."""
    record = ArrayRecord()
    for name, array in model(1).items():
        record[name] = CountedArray(array)
    CountedArray.reads = 0
    return record


def test_arrays_that_came_are_decoded_once_however_often_they_are_read(counted):
    decode(counted)
    reads = CountedArray.reads
    for _ in range(2):
        decode(counted)
        for read in (finite_arrays, lambda record: model_arrays(record, model(0)), as_arrays):
            arrays = read(counted)
            assert (len(arrays), list(arrays)) == (2, ["weight", "steps"])
            np.testing.assert_array_equal(arrays["weight"], model(1)["weight"])
    assert CountedArray.reads == reads > 0


@pytest.mark.parametrize("dtype", ["float32", "float64", ">i4", "uint8", "bool"])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3), (1, 1, 5)])
def test_an_encoded_array_is_read_where_it_lies(dtype, shape):
    values = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    record = ArrayRecord({"weight": Array(values)})
    found = as_arrays(record)["weight"]
    np.testing.assert_array_equal(found, values)
    assert (found.dtype, found.shape) == (values.dtype, values.shape)
    assert not found.flags.writeable
    encoded = np.frombuffer(record["weight"].data, np.uint8)
    assert not values.size or np.shares_memory(found, encoded)


def test_a_decoded_array_cannot_be_changed(counted):
    weight = finite_arrays(counted)["weight"]
    with pytest.raises(ValueError, match="read-only"):
        weight[0, 0] = 1.0


def test_a_decoded_record_can_be_sent_on_as_it_came(counted):
    before = {name: array.data for name, array in counted.items()}
    decode(counted)
    for name, array in counted.items():
        assert isinstance(array, Array)
        assert (array.dtype, array.shape) == (str(model(1)[name].dtype), model(1)[name].shape)
        assert array.data == before[name]
        np.testing.assert_array_equal(Array(array.numpy()).numpy(), model(1)[name])
    grid = InProcessGrid({1: lambda message: message.content})
    (reply,) = grid.send_and_receive([Message(RecordDict({"arrays": counted}), 1, "train")])
    found = as_arrays(sent_arrays(reply))
    np.testing.assert_array_equal(found["weight"], model(1)["weight"])


def test_reading_our_own_arrays_leaves_the_record_as_it_is(counted):
    arrays = as_arrays(counted)
    np.testing.assert_array_equal(arrays["weight"], model(1)["weight"])
    assert all(type(array) is CountedArray for array in counted.values())


def test_names_are_checked_before_anything_is_decoded(counted):
    with pytest.raises(ValueError, match="steps differ"):
        model_arrays(counted, {"weight": model(0)["weight"]})
    assert CountedArray.reads == 0


FAULTS = {
    "steps differ": {"steps": None},
    "more differ": {"more": np.zeros(3)},
    r"weight is float32 \(4, 3\), this run's model has float32 \(3, 4\)": {
        "weight": np.zeros((4, 3), np.float32)
    },
    "weight is float64": {"weight": np.zeros((3, 4))},
    "weight holds NaN or infinity": {"weight": np.full((3, 4), np.inf, np.float32)},
}


@pytest.mark.parametrize(("said", "changed"), FAULTS.items(), ids=FAULTS)
def test_a_model_that_cannot_be_averaged_with_ours_is_refused(said, changed):
    arrays = {n: array for n, array in {**model(1), **changed}.items() if array is not None}
    with pytest.raises(ValueError, match=said):
        check_arrays(arrays, model(0))
    with pytest.raises(ValueError, match=said):
        model_arrays(as_record(arrays), model(0))


def test_a_model_like_ours_is_taken_as_it_is():
    sent = model(1)
    assert check_arrays(sent, model(0)) is sent
    assert dict(model_arrays(as_record(sent), model(0))).keys() == sent.keys()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_arrays_of_any_form_must_be_finite(value):
    record = as_record({"fine": np.ones(2), "odd": np.array([1.0, value])})
    with pytest.raises(ValueError, match="odd holds NaN or infinity"):
        finite_arrays(record)


def test_averaging_takes_little_memory_besides_the_mean():
    models = [{f"w{i}": np.full(50_000, seed, np.float32) for i in range(20)} for seed in range(3)]
    size = sum(array.nbytes for array in models[0].values())
    tracemalloc.start()
    try:
        mean = weighted_mean((1.0, each) for each in models)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert mean.keys() == models[0].keys()
    assert peak < 1.5 * size


def test_a_models_arrays_leave_memory_as_they_are_encoded():
    mean = {f"w{i}": np.full(50_000, i, np.float32) for i in range(20)}
    size = sum(array.nbytes for array in mean.values())
    expected = {name: array.copy() for name, array in mean.items()}
    tracemalloc.start()
    try:
        for name, array in mean.items():
            mean[name] = array.copy()  # in memory that is traced
        del array
        record = moved_into_record(mean)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert mean == {}
    assert peak < 1.2 * size
    assert list(record) == list(expected)
    for name, array in as_arrays(record).items():
        np.testing.assert_array_equal(array, expected[name])


@pytest.mark.filterwarnings("error")
def test_a_model_takes_a_records_arrays_with_no_copy_on_the_way():
    model = nn.Linear(1000, 200)
    sent = {name: np.full(each.shape, 2, np.float32) for name, each in model.state_dict().items()}
    record = as_record(sent)
    tracemalloc.start()
    try:
        load_arrays(model, as_arrays(record))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < sent["weight"].nbytes / 2
    with torch.no_grad():
        model.weight.zero_()
    np.testing.assert_array_equal(as_arrays(record)["weight"], sent["weight"])
    np.testing.assert_array_equal(model.bias.detach().numpy(), sent["bias"])


@pytest.mark.parametrize("arrays", [{"w": np.ones(2)}, {"weight": np.ones(2), "bias": np.ones(1)}])
def test_a_model_refuses_arrays_of_another(arrays):
    with pytest.raises(RuntimeError):
        load_arrays(nn.Linear(2, 1), arrays)


def test_sent_models_average_as_those_in_memory():
    models = [model(seed) for seed in (1, 2, 3)]
    sent = [finite_arrays(sent_arrays(reply_with(as_record(each)))) for each in models]
    found = weighted_mean(zip((1.0, 2.0, 5.0), sent, strict=True))
    expected = weighted_mean(zip((1.0, 2.0, 5.0), models, strict=True))
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def test_summed_change_is_the_sum_over_models_in_double_precision():
    start, models = model(0), [model(seed) for seed in (1, 2, 3)]
    factors = [0.1, -2.0, 3.0]
    found = summed_change("weight", start, zip(factors, models, strict=True))
    expected = np.zeros((3, 4))
    for factor, each in zip(factors, models, strict=True):
        for at in np.ndindex(3, 4):
            expected[at] += factor * (float(each["weight"][at]) - float(start["weight"][at]))
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_a_reply_without_the_record_has_no_arrays():
    assert dict(sent_arrays(reply_with(ArrayRecord()), "gradient")) == {}


@pytest.mark.parametrize("read", [decode, finite_arrays, as_arrays])
def test_one_array_that_cannot_be_read_is_named(read):
    record = as_record(model(1))
    record["steps"] = Array("int64", (), "numpy.ndarray", b"junk")
    with pytest.raises(ValueError, match="steps cannot be read"):
        read(record)


@given(arrays("float32", array_shapes(min_dims=0, max_dims=9, min_side=0, max_side=3), fill=None))
def test_bytes_are_flowers_count_whether_or_not_a_record_is_decoded(values):
    record = ArrayRecord({"some name": Array(values), "b": Array(np.arange(3))})
    expected = record.count_bytes()
    assert num_bytes(record) == expected
    decode(record)
    assert num_bytes(record) == expected


def test_a_decoded_array_passes_between_rays_processes():
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    record = as_record({"w": np.arange(3.0)})
    decode(record)
    (array,) = cloudpickle.loads(cloudpickle.dumps(list(record.values())))
    assert array.numpy().tolist() == [0, 1, 2]


def test_files_of_received_arrays_have_their_values_in_whatever_order_these_lay():
    """safetensors writes bytes as they lie in memory, and names no order."""
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    record = ArrayRecord({"w": Array(np.asfortranarray(values))})
    np.testing.assert_array_equal(load(save(as_arrays(record)))["w"], values)
    np.testing.assert_array_equal(load(save(dict(finite_arrays(record))))["w"], values)
    layer = nn.Linear(3, 2, bias=False)
    layer.weight = nn.Parameter(torch.from_numpy(values).T.contiguous().T)
    np.testing.assert_array_equal(load(save(arrays_of(layer)))["weight"], values)
