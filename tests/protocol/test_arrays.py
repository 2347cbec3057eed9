"""Arrays that came from elsewhere are decoded when asked for, and with suspicion."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, RecordDict

from protocol.arrays import as_arrays, as_record, sent_arrays
from protocol.averages import summed_change, weighted_mean


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
    decoded = 0

    def numpy(self):
        CountedArray.decoded += 1
        return super().numpy()


def test_a_sent_array_is_decoded_when_it_is_asked_for_and_not_kept():
    record = ArrayRecord()
    for name, array in model(1).items():
        record[name] = CountedArray(array)
    CountedArray.decoded = 0
    sent = sent_arrays(reply_with(record))
    assert (len(sent), list(sent), "weight" in sent) == (2, ["weight", "steps"], True)
    assert CountedArray.decoded == 0
    np.testing.assert_array_equal(sent["weight"], model(1)["weight"])
    assert sent["weight"] is not sent["weight"]
    assert CountedArray.decoded == 3


def test_sent_models_average_as_those_in_memory():
    models = [model(seed) for seed in (1, 2, 3)]
    sent = [sent_arrays(reply_with(as_record(each))) for each in models]
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


@pytest.mark.parametrize("read", [lambda record: sent_arrays(reply_with(record)), as_arrays])
def test_one_array_that_cannot_be_read_is_named(read):
    record = as_record(model(1))
    record["steps"] = Array("int64", (), "numpy.ndarray", b"junk")
    with pytest.raises(ValueError, match="steps cannot be read"):
        dict(read(record))
