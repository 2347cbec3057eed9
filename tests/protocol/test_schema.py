"""What a node may reply: records, keys, types and ranges; all that is declared is accepted."""

import re
from typing import Annotated

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from pydantic import Field

from flwr_distill.protocol.arrays import as_record
from flwr_distill.protocol.meeting import DESCRIBE
from flwr_distill.protocol.registry import built_in_methods, phases_of
from flwr_distill.protocol.schema import (
    EVALUATE,
    TRAIN,
    NoMetrics,
    Reply,
    TrainMetrics,
    like_the_model,
    part_of_the_model,
)
from flwr_distill.strategies.fedhead.method import AGGREGATE_SECTOR
from flwr_distill.strategies.hfldd.method import LABEL_KNOWLEDGE, RECEIVE
from flwr_distill.task.settings import Block

MODEL = {"w": np.zeros((2, 3), np.float32), "n": np.array(0)}


class Colours(Block):
    red: Annotated[float, Field(ge=0, le=1)]
    name: str | None = None


class Paint(Block):
    litres: int


REPLY = Reply(
    metrics=Colours,
    arrays={"arrays": like_the_model, "part": part_of_the_model},
    configs={"paint": Paint, "tin.*": Paint},
    optional={"part", "paint"},
)


def whole(**changed):
    """A reply that fits, with some records changed, or left out where None."""
    records = {
        "metrics": MetricRecord({"red": 0.5}),
        "arrays": as_record(MODEL),
        "part": as_record({"w": MODEL["w"]}),
        "paint": ConfigRecord({"litres": 2}),
        "tin.1": ConfigRecord({"litres": 1}),
        "tin.12": ConfigRecord({"litres": 3}),
        **changed,
    }
    names = {name.replace("_", "."): record for name, record in records.items()}
    return RecordDict({name: record for name, record in names.items() if record is not None})


@pytest.mark.parametrize(
    "changed", [{}, {"part": None}, {"paint": None}, {"tin_1": None, "tin_12": None}]
)
def test_a_reply_that_fits_is_accepted_also_without_what_is_optional(changed):
    REPLY.check(whole(**changed), MODEL)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"arrays": None}, "it brings no record 'arrays'"),
        ({"more": ConfigRecord()}, "it brings a record 'more' that this phase has no use for"),
        ({"paint_1": ConfigRecord({"litres": 2})}, "it brings a record 'paint.*'"),
        ({"tin": ConfigRecord({"litres": 2})}, "it brings a record 'tin'"),
        ({"tin_x": ConfigRecord({"litres": 2})}, "it brings a record 'tin.x'"),
        ({"metrics": None}, "metrics: "),
        ({"metrics": MetricRecord({"red": 2.0})}, "metrics: red = 2.0"),
        ({"metrics": MetricRecord({"red": float("nan")})}, "metrics: red = nan"),
        ({"metrics": MetricRecord({"red": float("inf")})}, "metrics: red = inf"),
        ({"metrics": MetricRecord({"red": [0.5]})}, "metrics: red = [0.5]"),
        ({"metrics": MetricRecord({"red": 0.5, "blue": 0.5})}, "blue"),
        ({"metrics": ConfigRecord({"red": 0.5})}, "metrics is a ConfigRecord"),
        ({"arrays": ConfigRecord()}, "arrays is a ConfigRecord"),
        ({"paint": MetricRecord({"litres": 1})}, "paint is a MetricRecord"),
        ({"paint": ConfigRecord({"litres": "two"})}, "paint: litres = 'two'"),
        ({"paint": ConfigRecord({})}, "paint: "),
        ({"tin_12": ConfigRecord({"litres": b""})}, "tin.12: litres = "),
        ({"part": as_record({"v": MODEL["w"]})}, "its v is not of this run's model"),
        ({"part": as_record({"w": np.zeros((3, 2))})}, "its w is not of this run's model"),
        ({"part": as_record({"w": np.full((2, 3), np.nan)})}, "w holds NaN or infinity"),
        ({"arrays": as_record({"w": MODEL["w"]})}, "(n differ)"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changed, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        REPLY.check(whole(**changed), MODEL)


def test_a_part_of_the_model_may_be_empty_or_of_another_type():
    """Such as a control variate in half the precision, or before any was made."""
    REPLY.check(whole(part=ArrayRecord()), MODEL)
    REPLY.check(whole(part=as_record({"w": MODEL["w"].astype(np.float16)})), MODEL)


def test_without_metrics_none_are_accepted():
    empty = Reply()
    assert empty.metrics is NoMetrics
    empty.check(RecordDict(), {})
    empty.check(RecordDict({"metrics": MetricRecord()}), {})
    with pytest.raises(ValueError, match="red"):
        empty.check(RecordDict({"metrics": MetricRecord({"red": 1.0})}), {})


def test_a_reply_with_more_has_all_that_it_had():
    more = TRAIN.plus(arrays={"gradient": part_of_the_model})
    assert more.metrics is TrainMetrics
    assert more.arrays.keys() == {"arrays", "gradient"}
    assert TRAIN.arrays.keys() == {"arrays"}
    assert TRAIN.plus(metrics=Colours) == Reply(metrics=Colours, arrays=TRAIN.arrays)


def reply_to_train(**metrics):
    numbers = {"num-examples": 3, **{key.replace("_", "-"): v for key, v in metrics.items()}}
    return RecordDict({"arrays": as_record(MODEL), "metrics": MetricRecord(numbers)})


def test_plain_training_need_not_tell_more_than_its_samples():
    TRAIN.check(reply_to_train(), MODEL)
    TRAIN.check(
        reply_to_train(num_steps=0, train_loss=0.0, train_accuracy=1.0, dp_epsilon=0.0), MODEL
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num-examples", 0),
        ("num-examples", 2**63),
        ("num-examples", 1.0),
        ("num-steps", -1),
        ("train-accuracy", 1.01),
        ("train-accuracy", -0.01),
        ("train-loss", float("inf")),
        ("dp-epsilon", -0.1),
        ("dp-delta", 1.1),
    ],
)
def test_numbers_of_training_are_in_range(key, value):
    with pytest.raises(ValueError, match=re.escape(f"metrics: {key} = {value}")):
        TRAIN.check(reply_to_train(**{key: value}), MODEL)


def test_an_evaluation_is_a_share_of_at_least_one_sample():
    def reply(**numbers):
        return RecordDict({"metrics": MetricRecord(numbers)})

    EVALUATE.check(reply(**{"num-examples": 1, "eval-accuracy": 1.0}), MODEL)
    EVALUATE.check(reply(**{"num-examples": 1, "eval-accuracy": 0, "eval-loss": 2.0}), MODEL)
    for wrong in ({"num-examples": 0}, {"eval-accuracy": 1.5}, {"eval-loss": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            EVALUATE.check(reply(**{"num-examples": 1, "eval-accuracy": 0.5, **wrong}), MODEL)
    with pytest.raises(ValueError, match="eval-accuracy"):
        EVALUATE.check(reply(**{"num-examples": 1}), MODEL)


def allowed(method, message_type):
    (reply,) = phases_of(built_in_methods()[method])[message_type].replies
    return reply


SOFT = np.full((4, 5), 0.2, np.float32)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"soft-labels": 2 * SOFT}, "are not distributions"),
        ({"soft-labels": SOFT[0]}, "are not distributions"),
        ({"soft-labels": np.eye(5, dtype=np.int64)}, "are not distributions"),
        ({"soft-labels": SOFT * np.nan}, "NaN"),
        ({"hard-labels": SOFT}, "its arrays are not soft-labels"),
        ({"soft-labels": SOFT, "more": SOFT}, "its arrays are not soft-labels"),
        ({}, "its arrays are not soft-labels"),
    ],
)
def test_soft_labels_are_distributions(arrays, said):
    reply = allowed("hfldd", LABEL_KNOWLEDGE)
    metrics = MetricRecord({"num-examples": 3})
    fitting = RecordDict({"arrays": as_record({"soft-labels": SOFT}), "metrics": metrics})
    reply.check(fitting, {})
    with pytest.raises(ValueError, match=said):
        reply.check(RecordDict({"arrays": as_record(arrays), "metrics": metrics}), {})


def test_a_head_names_the_parcels_that_it_keeps_by_rank():
    reply = allowed("hfldd", RECEIVE)

    def told(**numbers):
        full = {"num-examples": 3, "kept-parcels": [0, 2], "rejected": 1, **numbers}
        return RecordDict({"metrics": MetricRecord(full)})

    reply.check(told(), {})
    reply.check(told(**{"kept-parcels": []}), {})
    for ranks in ([-1], [0.5], 3):
        with pytest.raises(ValueError, match="kept-parcels"):
            reply.check(told(**{"kept-parcels": ranks}), {})


def test_a_leader_says_why_it_rejects_models_by_rank():
    reply = allowed("fedhead", AGGREGATE_SECTOR)

    def told(config):
        return RecordDict({"arrays": as_record(MODEL), "config": ConfigRecord(config)})

    reply.check(told({}), MODEL)
    reply.check(told({"rejected.1": "w holds NaN", "rejected.12": "no"}), MODEL)
    for wrong in (
        {"rejected.x": "no"},
        {"rejected": "no"},
        {"why.1": "no"},
        {"rejected.1": 1},
        {"rejected.2": "so long" * 50},
    ):
        with pytest.raises(ValueError, match=re.escape(next(iter(wrong)))):
            reply.check(told(wrong), MODEL)


def test_a_node_describes_itself_by_its_samples_and_what_else_it_has():
    (reply,) = phases_of(None)[DESCRIBE].replies
    samples = {"num-examples": 0}
    reply.check(RecordDict({"metrics": MetricRecord(samples)}), {})
    full = MetricRecord({**samples, "partition-id": 3, "sector": 1})
    reply.check(RecordDict({"metrics": full, "config": ConfigRecord({"dataset": "usps"})}), {})
    said = {"name": "ward-3", "class-names": ["cat", "dog"], "classes": [0, 7], "missing": ["x"]}
    reply.check(RecordDict({"metrics": full, "config": ConfigRecord(said)}), {})
    for config in (
        *({"dataset": ""}, {"dataset": "x" * 201}, {"dataset": 3}),
        *({"name": name} for name in ("", " ward", "x" * 41, "two\nlines", "\u202eward")),
        *({"class-names": names} for names in ([""], ["x" * 61], ["a\tb"], ["x"] * 10_001)),
        *({"classes": classes} for classes in ([-1], [10_000], [0] * 10_001)),
        *({"missing": missing} for missing in ([""], ["x" * 301], ["x\x1b[31m"], ["x"] * 9)),
    ):
        told = RecordDict({"metrics": full, "config": ConfigRecord(config)})
        with pytest.raises(ValueError, match="config: "):
            reply.check(told, {})
