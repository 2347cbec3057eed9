"""What single replies are refused for as they come, and that honest nodes are left alone."""

import os
import pickle
import re
from io import BytesIO

import numpy as np
import pytest
from flwr.app import Array, ConfigRecord, Message, MetricRecord, RecordDict

from benchmarks.in_process import FIRST_NODE
from flwr_distill.protocol.arrays import as_record
from flwr_distill.protocol.registry import built_in_methods, phases_of
from flwr_distill.protocol.replies import SET_ASIDE
from flwr_distill.strategies.fedhead.method import TRAIN_SECTOR
from flwr_distill.strategies.fedlgd.method import TRAIN_VIRTUAL
from tests.grids import screened

START = {"w": np.zeros((2, 3), np.float32), "steps": np.array(7, np.int64)}


def update(size=0.1, **changed):
    """What a node sends: every weight has moved by ``size``."""
    return {"w": START["w"] + np.float32(size), "steps": np.array(900, np.int64), **changed}


def judge(contents, kind="train", start=START, method="fedavg", **settings):
    """Reasons by place, for a reply of each content to a message with a model."""
    starts = start if isinstance(start, list) else [start] * len(contents)
    messages = [
        Message(RecordDict({"arrays": as_record(s)} if s else {}), FIRST_NODE + i, kind)
        for i, s in enumerate(starts)
    ]
    answers = [lambda _, content=content: content for content in contents]
    phases = phases_of(built_in_methods()[method])
    replies = screened(answers, messages, phases=phases, model=START, **settings)
    assert len(replies) == len(contents)
    errors = {place: reply.error for place, reply in enumerate(replies) if reply.has_error()}
    assert {error.code for error in errors.values()} <= {SET_ASIDE}
    return {place: error.reason for place, error in errors.items()}


def content(arrays=None, num_examples=100, **metrics):
    record = as_record(update() if arrays is None else arrays)
    numbers = {"num-examples": num_examples, "train-loss": 0.5, **metrics}
    return RecordDict({"arrays": record, "metrics": MetricRecord(numbers)})


def with_bytes(data, dtype="float32", shape=(2, 3), stype="numpy.ndarray"):
    forged = content()
    forged["arrays"]["w"] = Array(dtype, shape, stype, data)
    return forged


def with_record(name, record):
    forged = content()
    forged[name] = record
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
        (content(num_examples=0), "num-examples = 0"),
        (content(num_examples=-5), "num-examples = -5"),
        (content(num_examples=2**63 - 1), f"num-examples = {2**63 - 1}"),
        (content(num_examples=2**63), f"num-examples = {2**63}"),
        (content(num_examples=float("nan")), "num-examples = nan"),
        (content(num_examples=100.0), "num-examples = 100.0"),
        (content(num_examples=10**18), f"num-examples = {10**18}"),
        (content(num_examples=1e308), r"num-examples = 1e\+308"),
        (content(num_examples=[100]), r"num-examples = \[100\]"),
        (content(extra=1.0), "extra"),
        (content(**{f"extra-{i}": 1.0 for i in range(200_000)}), "more than 10,000 numbers"),
        (content(extra=[1.0] * 200_000), "more than 10,000 numbers"),
        (content(**{"train-loss": 1.7e308}), r"train-loss = 1.7e\+308"),
        (content({f"w{i}": np.zeros(1) for i in range(3_000)}), "more than 1,0.. parts"),
        (content({f"w{i}": np.zeros(1) for i in range(900)}), r"differ\)"),
        (content(**{"train-loss": float("nan")}), "train-loss = nan"),
        (content(**{"train-accuracy": 1.5}), "train-accuracy = 1.5"),
        (content(**{"num-steps": -1}), "num-steps = -1"),
        (content(**{"dp-epsilon": -1.0}), "dp-epsilon = -1.0"),
        (RecordDict({"arrays": as_record(update())}), "num-examples"),
        (RecordDict(), "brings no record 'arrays'"),
        (RecordDict({"metrics": MetricRecord({"num-examples": 100})}), "no record 'arrays'"),
        (RecordDict({"arrays": ConfigRecord(), "metrics": MetricRecord()}), "num-examples"),
        (with_record("arrays", MetricRecord({"w": 1.0})), "arrays is a MetricRecord"),
        (with_record("metrics", ConfigRecord({"num-examples": 100})), "metrics is a ConfigRecord"),
        (with_record("more", as_record(update())), "brings a record 'more'"),
        (with_record("parcel", ConfigRecord({"x": 1})), "brings a record 'parcel'"),
        (content(update(size=1e5)), "norm of its arrays exceeds norm-threshold"),
        (content(update(size=3e38)), "norm of its arrays exceeds norm-threshold"),
    ],
)
def test_a_broken_reply_is_set_aside_with_the_reason_and_no_other_is(broken, said):
    reasons = judge([content(), broken, *(content() for _ in range(4))])
    assert list(reasons) == [1]
    assert re.search(said, reasons[1])


def test_a_reply_that_breaks_one_thing_after_another_is_refused_for_the_records_first():
    broken = content({}, num_examples=0)
    broken["more"] = ConfigRecord()
    assert "more" in judge([broken])[0]


def test_an_array_that_claims_more_than_there_is_memory_is_refused():
    honest = npy_of(np.zeros((2, 3), np.float32))
    begin, end = honest.index(b"(2, 3)"), honest.index(b"\n")
    claim = b"(9999999, 9999999), }"
    forged = honest[:begin] + claim + b" " * (end - begin - len(claim)) + honest[end:]
    assert judge([with_bytes(forged)]) == {0: "w cannot be read (ValueError)"}


def test_nothing_is_said_of_good_replies():
    assert judge([content() for _ in range(6)]) == {}
    told = {"num-steps": 3, "train-accuracy": 0.5, "dp-epsilon": 2.0, "dp-delta": 1e-5}
    assert judge([content(**told) for _ in range(6)]) == {}


def test_error_replies_are_not_judged_but_logged(caplog):
    def failing(message):
        raise RuntimeError("this node is broken")

    (reply,) = screened([failing])
    assert (reply.error.code, reply.error.reason) == (SET_ASIDE, "this node is broken")
    assert caplog.messages == [f"1 node failed in train: {FIRST_NODE}: this node is broken"]


def test_a_second_record_must_be_the_models_and_finite_and_of_a_length_like_the_others():
    def controlled(size, name="w", shape=(2, 3)):
        sent = content()
        sent["control-variate"] = as_record({name: np.full(shape, size, np.float32)})
        return sent

    def reasons(contents):
        return judge(contents, method="scaffold")

    assert reasons([controlled(s) for s in (1, 2, 3, 4, 5)]) == {}
    assert list(reasons([controlled(s) for s in (1, 2, np.nan, 4, 5)])) == [2]
    assert "control-variate" in reasons([controlled(s) for s in (1, 2, 1e6, 4, 5)])[2]
    assert "its v is not of" in reasons([controlled(1), controlled(1, name="v")])[1]
    assert "its w is not of" in reasons([controlled(1), controlled(1, shape=(6,))])[1]
    assert "no record 'control-variate'" in reasons([controlled(1), content()])[1]


def test_a_node_that_says_what_it_lacks_is_left_to_the_strategy():
    missing = RecordDict({"metrics": MetricRecord({"needs-global-data": 1})})
    sent = [content(), missing, content(), content()]
    assert judge(sent, kind=TRAIN_VIRTUAL, method="fedlgd") == {}
    assert list(judge(sent)) == [1]  # where no phase knows of it


def test_replies_are_measured_from_what_their_own_node_was_sent():
    """Nodes may be sent different models, as where some are smaller."""
    wide = {"w": np.full((5,), 1e6, np.float32)}
    models = [START, wide, START, wide, START, START]
    moved = [{name: array + array.dtype.type(1) for name, array in m.items()} for m in models]
    assert judge([content(arrays) for arrays in moved], start=models) == {}
    assert list(judge([content(arrays) for arrays in moved])) == [1, 3]


def test_without_a_model_in_the_message_the_runs_own_is_compared_with():
    contents = [content(update(size)) for size in (1, 1, 1, 1, 1e9)]
    contents.append(content(update(w=np.zeros((6,), np.float32))))
    assert list(judge(contents, start=None)) == [4, 5]


def test_a_parcel_that_is_none_is_refused():
    parcel = ConfigRecord({"x": 1})
    metrics = MetricRecord({"num-examples": 9, "train-loss": 0.5, "update-norm": 0.1})
    replies = [RecordDict({"metrics": metrics, "parcel": parcel})]
    assert "parcel: " in judge(replies, kind=TRAIN_SECTOR, method="fedhead")[0]
