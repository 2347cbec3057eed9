"""Whatever nodes reply, the grid hands it on or rejects it, and the run continues."""

from io import BytesIO

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.in_process import InProcessGrid
from flwr_distill.protocol.arrays import as_record
from flwr_distill.protocol.registry import all_methods, phases_of
from tests.grids import screening_grid

from .conftest import FUZZ, damaged

MODEL = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(1)}
FILE = BytesIO()
np.save(FILE, MODEL["w"])
RUNS = {name: phases_of(method) for name, method in all_methods().items()}
REPLIES = [reply for run in RUNS.values() for phase in run.values() for reply in phase.replies]
NAMES = {name for reply in REPLIES for name in (*reply.arrays, *reply.configs)}
KEYS = {
    field.alias
    for reply in REPLIES
    for block in (reply.metrics, *reply.configs.values())
    for field in block.model_fields.values()
}
phases = st.sampled_from(
    [("fedavg", "query.unknown"), *((name, kind) for name, run in RUNS.items() for kind in run)]
)
names = st.sampled_from(sorted(NAMES | {"metrics", "parcel.0", "parcel.1"})) | st.text(min_size=1)
keys = st.sampled_from(sorted(KEYS)) | st.text(min_size=1)
integers = st.integers(-(2**63), 2**63 - 1)
numbers = integers | st.floats() | st.sampled_from([[1, -2], [0.5], []])
values = numbers | st.booleans() | st.text() | st.binary(max_size=40)
contents = st.binary(max_size=60) | damaged(FILE.getvalue())
arrays = st.builds(
    lambda data, shape: Array("float32", shape, "numpy.ndarray", data),
    contents,
    st.sampled_from([(2, 3), (), (2**40,)]),
) | st.sampled_from([Array(array) for array in MODEL.values()])
records = (
    st.dictionaries(keys, numbers, max_size=4).map(MetricRecord)
    | st.dictionaries(keys, values, max_size=4).map(ConfigRecord)
    | st.dictionaries(st.sampled_from(["w", "n", "x"]), arrays, max_size=3).map(ArrayRecord)
    | st.builds(as_record, st.just(MODEL))  # a new one each time: what draws it may change it
)
replies = st.dictionaries(names, records, max_size=4).map(RecordDict)
TRAINED = RecordDict(
    {"arrays": as_record(MODEL), "metrics": MetricRecord({"num-examples": 3, "train-loss": 0.1})}
)


def replies_of(method, kind, answers):
    """Replies of nodes, as the grid hands them on in a run of a method."""
    nodes = {place: lambda message, place=place: answers[place] for place in range(len(answers))}
    inner = InProcessGrid(nodes)
    grid = screening_grid(inner, deadline=60, model=MODEL, phases=RUNS[method])
    sent = RecordDict({"arrays": as_record(MODEL)})
    return grid.send_and_receive([Message(sent, node, kind) for node in nodes])


@FUZZ
@given(phases, st.lists(replies, max_size=5))
def test_a_reply_is_handed_on_with_arrays_that_can_be_read_or_is_an_error(phase, answers):
    found = replies_of(*phase, answers)
    assert [reply.metadata.src_node_id for reply in found] == list(range(len(answers)))
    for reply in found:
        if reply.has_content():
            for record in reply.content.array_records.values():
                read = [array.numpy() for array in record.values()]
                assert all(array.dtype.kind in "fiub" for array in read)
                assert phase[1] == "query.unknown" or all(np.isfinite(each).all() for each in read)


def test_whole_replies_are_handed_on():
    metrics = MetricRecord({"num-examples": 3, "train-loss": 0.1})
    trained = RecordDict({"arrays": as_record(MODEL), "metrics": metrics})
    assert all(reply.has_content() for reply in replies_of("fedavg", "train", [trained] * 5))
