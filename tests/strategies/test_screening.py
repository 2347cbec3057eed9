"""Screening: what is set aside and why, and that honest nodes are left alone."""

import math
import os
import pickle
import re
import statistics
from io import BytesIO

import numpy as np
import pytest
from flwr.app import Array, ConfigRecord, Error, Message, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from server.grid.judging import reasons_to_set_aside

from protocol.arrays import as_record
from protocol.outliers import absurdly_large, update_norm

START = {"w": np.zeros((2, 3), np.float32), "steps": np.array(7, np.int64)}
FIRST = 2**64 - 1000


def update(size=0.1, **changed):
    """What a node sends: every weight has moved by ``size``."""
    return {"w": START["w"] + np.float32(size), "steps": np.array(900, np.int64), **changed}


def judge(contents, norm_threshold=5.0, kind="train", start=START):
    """Reasons by place, for a reply of each content, to a message with the model ``start``."""
    sent = RecordDict({"arrays": as_record(start), "config": ConfigRecord()})
    messages = [Message(sent, FIRST + i, kind) for i in range(len(contents))]
    replies = [Message(c, reply_to=m) for c, m in zip(contents, messages, strict=True)]
    return reasons_to_set_aside(messages, replies, norm_threshold, {})


def content(arrays=None, num_examples=100, **metrics):
    record = as_record(update() if arrays is None else arrays)
    numbers = {"num-examples": num_examples, "train-loss": 0.5, **metrics}
    return RecordDict({"arrays": record, "metrics": MetricRecord(numbers)})


def with_bytes(data, dtype="float32", shape=(2, 3), stype="numpy.ndarray"):
    forged = content()
    forged["arrays"]["w"] = Array(dtype, shape, stype, data)
    return forged


class Bomb:
    def __reduce__(self):
        return os._exit, (13,)


def npy_of(array, **settings):
    file = BytesIO()
    np.save(file, array, **settings)
    return file.getvalue()


BOMB = pickle.dumps(Bomb())


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (content(update(w=np.full((2, 3), np.nan, np.float32))), "w holds NaN or infinity"),
        (content(update(w=np.full((2, 3), -np.inf, np.float32))), "w holds NaN or infinity"),
        (content(update(w=np.zeros((3, 2), np.float32))), r"w is float32 \(3, 2\)"),
        (content(update(w=np.zeros((2, 3)))), "w is float64"),
        (content(update(w=np.zeros((2, 3), "U4"))), "w is not an array of numbers"),
        (content({"w": START["w"]}), r"\(steps differ\)"),
        (content(update(v=START["w"])), r"\(v differ\)"),
        (content({}), "differ"),
        (with_bytes(BOMB), "w cannot be read"),
        (with_bytes(npy_of(np.array([Bomb()]), allow_pickle=True)), "w cannot be read"),
        (with_bytes(b""), "w cannot be read"),
        (with_bytes(b"PK\x03\x04 and the like"), "w cannot be read"),
        (with_bytes(npy_of(START["w"])[:-1]), "w cannot be read"),
        (with_bytes(npy_of(START["w"]), stype="pickle"), "w cannot be read"),
        (content(num_examples=0), "num-examples are 0"),
        (content(num_examples=-5), "num-examples are -5"),
        (content(num_examples=float("nan")), "num-examples is nan"),
        (content(num_examples=10**6), "num-examples are absurdly many"),
        (content(num_examples=[100]), "records are not those of most"),
        (content(extra=1.0), "records are not those of most"),
        (RecordDict({"arrays": as_record(update())}), "records are not those of most"),
        (RecordDict(), "records are not those of most"),
        (content(update(size=1e5)), "norm of its arrays is beyond norm-threshold"),
        (content(update(size=3e38)), "norm of its arrays is beyond norm-threshold"),
    ],
)
def test_a_broken_reply_is_set_aside_with_the_reason_and_no_other_is(broken, said):
    reasons = judge([content(), broken, *(content() for _ in range(4))])
    assert list(reasons) == [1]
    assert re.search(said, reasons[1])


def test_an_array_that_claims_more_than_there_is_memory_is_refused():
    honest = npy_of(np.zeros((2, 3), np.float32))
    begin, end = honest.index(b"(2, 3)"), honest.index(b"\n")
    claim = b"(9999999, 9999999), }"
    forged = honest[:begin] + claim + b" " * (end - begin - len(claim)) + honest[end:]
    reasons = judge([with_bytes(forged)])
    assert reasons == {0: "w cannot be read (MemoryError)"}


def test_error_replies_are_not_judged_and_nothing_is_said_of_good_ones():
    assert judge([content() for _ in range(6)]) == {}
    message = Message(RecordDict(), FIRST, "train")
    failed = Message(Error(0, "x"), reply_to=message)
    assert reasons_to_set_aside([message], [failed], 5.0, {}) == {}


def test_a_second_record_must_be_finite_and_of_a_length_like_the_others():
    def controlled(size):
        sent = content()
        sent["control-variate"] = as_record({"w": np.full((2, 3), size, np.float32)})
        return sent

    assert judge([controlled(s) for s in (1, 2, 3, 4, 5)]) == {}
    assert list(judge([controlled(s) for s in (1, 2, np.nan, 4, 5)])) == [2]
    assert "control-variate" in judge([controlled(s) for s in (1, 2, 1e6, 4, 5)])[2]


def test_a_node_that_says_what_it_lacks_is_left_to_the_strategy():
    lacks = RecordDict({"metrics": MetricRecord({"lacks-global-data": 1})})
    assert judge([content(), lacks, content(), content()], kind="train.virtual") == {}


def test_replies_are_measured_from_what_their_own_node_was_sent():
    """Nodes may be sent different models, as where some are smaller."""
    wide = {"w": np.full((5,), 1e6, np.float32)}
    models = [START, wide, START, wide, START, START]
    messages = [
        Message(RecordDict({"arrays": as_record(m)}), FIRST + i, "train")
        for i, m in enumerate(models)
    ]
    moved = [{name: array + array.dtype.type(1) for name, array in m.items()} for m in models]
    replies = [Message(content(a), reply_to=m) for a, m in zip(moved, messages, strict=True)]
    assert reasons_to_set_aside(messages, replies, 5.0, {}) == {}


def test_models_that_go_to_leaders_leave_the_claims_to_be_judged():
    parcels = [MetricRecord({"num-examples": n}) for n in (50, 70, 10**6, 60, 80)]
    replies = [RecordDict({"metrics": m, "parcel": ConfigRecord({"x": 1})}) for m in parcels]
    replies[0].pop("parcel")  # the leader's
    assert list(judge(replies)) == [2]


@given(st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=6), st.floats(-9, 9, width=32))
def test_the_norm_is_that_of_all_changes_of_floating_point_numbers(values, step):
    start = {
        "a": np.array(values, np.float32),
        "b": np.array([values], np.float64),
        "n": np.array(4),
    }
    moved = {
        "a": start["a"] + np.float32(step),
        "b": start["b"] * 2,
        "n": np.array(10**9),
    }
    squares = [(float(new) - old) ** 2 for new, old in zip(moved["a"], values, strict=True)]
    squares += [value**2 for value in values]
    assert update_norm(moved, start) == pytest.approx(math.sqrt(sum(squares)))


def scores(values):
    """Robust z-scores of logarithms, with at least 1 as their unit."""
    logs = [math.log(value) for value in values]
    median = statistics.median(logs)
    unit = max(1.4826 * statistics.median(abs(log - median) for log in logs), 1.0)
    return [(log - median) / unit for log in logs]


@given(st.lists(st.floats(1e-6, 1e9), min_size=4, max_size=12), st.floats(0.1, 8))
def test_absurd_is_what_scores_above_the_threshold(values, threshold):
    expected = [i for i, score in enumerate(scores(values)) if score > threshold]
    assert absurdly_large(dict(enumerate(values)), threshold) == expected


@given(st.lists(st.floats(1.0, 140.0), min_size=4, max_size=12))
def test_what_differs_by_less_than_140_times_is_never_absurd_by_default(values):
    assert absurdly_large(dict(enumerate(values)), 5.0) == []


@given(st.lists(st.floats(0.67, 1.5), min_size=8, max_size=40), st.floats(1e-6, 1e6))
def test_two_in_ten_that_are_1000_times_too_large_are_always_found(honest, unit):
    num_hostile = len(honest) // 4
    values = [unit * value for value in (*honest, *[1000.0] * num_hostile)]
    found = absurdly_large(dict(enumerate(values)), 5.0)
    assert found == list(range(len(honest), len(values)))


@pytest.mark.parametrize("values", [[1, 1, 1e9], [1, 0, 0, 0, 1, 1e9], [0] * 9, []])
def test_among_fewer_than_four_nothing_is_absurd_and_zeros_do_not_count(values):
    assert absurdly_large(dict(enumerate(values)), 5.0) == []


def test_a_threshold_of_0_judges_no_norm():
    contents = [content(update(size)) for size in (1, 1, 1, 1, 1e9)]
    assert list(judge(contents)) == [4]
    assert judge(contents, norm_threshold=0) == {}
