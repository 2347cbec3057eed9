"""Calls between the processes of an edge, and which runs an edge can take part in."""

import threading
import time

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from flwr_distill.protocol.arrays import as_arrays, as_record
from flwr_distill.protocol.edge import check_plain, from_bytes, task_of, to_bytes, why_not_above
from flwr_distill.protocol.edge_calls import EdgeError, NobodyThereError, call, listen
from flwr_distill.task.errors import SettingsError


@pytest.fixture
def served(tmp_path):
    """Listen at a socket with these answers."""
    servers = []

    def serve(threads=2, **answers):
        servers.append(listen(tmp_path / "socket", answers, threads=threads))
        return tmp_path / "socket"

    yield serve
    for server in servers:
        server.stop(grace=None).wait()


def test_an_answer_comes_back_and_the_listener_knows_how_long_the_caller_waits(served):
    waits = []
    socket = served(Ask=lambda request, seconds: waits.append(seconds) or request[::-1])
    assert call(socket, "Ask", b"abc", 20.0) == b"cba"
    assert 0 < waits[0] < 20.5  # gRPC sends deadlines in steps, and rounds them up


def test_a_socket_in_a_folder_with_a_long_name_is_reached(tmp_path):
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    server = listen(folder / "socket", {"Ask": lambda request, seconds: request[::-1]}, threads=2)
    try:
        assert call(folder / "socket", "Ask", b"abc", 20.0) == b"cba"
    finally:
        server.stop(grace=None).wait()
    with pytest.raises(NobodyThereError):
        call(tmp_path / "none" / ("long" * 30), "Ask", b"", 5.0)


def test_a_refusal_brings_its_reason(served):
    def refuse(request, seconds):
        raise EdgeError("too few nodes\n" + 5000 * "x")

    with pytest.raises(EdgeError, match="too few nodes") as refused:
        call(served(Ask=refuse), "Ask", b"", 20.0)
    assert not isinstance(refused.value, NobodyThereError)
    assert len(str(refused.value)) < 2500


def test_nobody_is_waited_for_beyond_the_deadline(served):
    over = threading.Event()
    socket = served(Ask=lambda request, seconds: bytes(over.wait(60)))
    start = time.monotonic()
    with pytest.raises(EdgeError, match="within 0 s"):
        call(socket, "Ask", b"", 0.3)
    assert time.monotonic() - start < 20
    over.set()


def test_a_socket_where_nobody_listens_is_told_apart(tmp_path):
    with pytest.raises(NobodyThereError):
        call(tmp_path / "none", "Ask", b"", 5.0)


def test_a_message_comes_back_from_bytes_as_it_was():
    arrays = {"b": np.array(3), "a": np.arange(6, dtype=np.float32).reshape(2, 3).T}
    records = {
        "arrays": as_record(arrays),
        "config": ConfigRecord({"lr": 0.1, "names": ["a"], "on": True}),
        "metrics": MetricRecord({"num-examples": 2**60, "train-loss": 1 / 3}),
    }
    content = RecordDict(records)
    message = Message(content, 7, "train", ttl=9.0)
    again = from_bytes(to_bytes(message))
    assert again.metadata.message_type == "train"
    assert list(again.content) == list(content)
    for name in ("config", "metrics"):
        assert type(again.content[name]) is type(content[name])
        assert dict(again.content[name]) == dict(content[name])
    assert list(again.content["arrays"]) == ["b", "a"]
    for name, values in as_arrays(again.content["arrays"]).items():
        np.testing.assert_array_equal(values, arrays[name])
        assert values.dtype == arrays[name].dtype


@pytest.mark.parametrize(
    "strategy",
    [
        *("fedavg", "fedprox", "fedmedian", "krum", "multikrum", "bulyan", "agreement", "cadis"),
        *("fedavgm", "fedadam", "dp-fixed-server", "feddf", "dynafed", "my.module:Class"),
    ],
)
def test_an_edge_takes_part_where_models_are_all_that_is_exchanged(strategy):
    assert why_not_above({"strategy": strategy}) == ""


@pytest.mark.parametrize(
    "strategy",
    [
        *("hfldd", "fedhead", "auto", "analytic", "fedlgd", "scaffold", "feddyn", "moon", "fedmd"),
        *("fednova", "qfedavg", "dp-fixed-client", "fedproto", "fedseq", "vhl"),
    ],
)
def test_an_edge_stays_away_where_nodes_owe_more_than_a_model(strategy):
    assert f"strategy = {strategy!r} asks nodes for more" in why_not_above({"strategy": strategy})


def test_an_edge_evaluates_no_model_of_a_file_for_the_run_above():
    reason = why_not_above({"strategy": "fedavg", "evaluate.model": "model.onnx"})
    assert "evaluate.model needs the nodes themselves" in reason


def test_the_task_comes_from_above_and_nothing_else_does():
    above = {
        "dataset": "digits",
        "train.lr": 0.1,
        "partition.alpha": 0.5,
        "seed": 3,
        "model": "mlp",
    }
    others = {"strategy": "krum", "min-nodes": 9, "data-root": "/there", "runs-dir": "there"}
    assert task_of({**above, **others}) == above


ARRAYS = ArrayRecord()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"arrays": ARRAYS, "config": ConfigRecord({"clipping_norm": 1.0})}, "'clipping_norm'"),
        ({"arrays": ARRAYS, "control-variate": ArrayRecord()}, "'control-variate'"),
        ({"config": ConfigRecord({"lr": 0.1})}, "no model"),
        ({"arrays": ARRAYS, "route": ConfigRecord()}, "'route'"),
    ],
)
def test_a_message_that_brings_more_than_a_model_is_refused_by_what_it_brings(content, named):
    with pytest.raises(SettingsError, match=f"brings {named}: an edge takes part"):
        check_plain(Message(RecordDict(content), 1, "train"))


def test_a_message_may_bring_settings_of_training():
    config = ConfigRecord({"lr": 0.1, "server-round": 3, "proximal-mu": 0.1})
    check_plain(Message(RecordDict({"arrays": ARRAYS, "config": config}), 1, "train"))
