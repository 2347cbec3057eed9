"""Runs over coded links: fewer bytes, the same models for the same seed, resumed or not."""

import json

import pytest
from flwr.app import Array, ArrayRecord

from benchmarks.in_process import run_in_process
from flwr_distill.protocol.coded import CODEC, PREFIX
from flwr_distill.protocol.messages import ARRAYS
from flwr_distill.protocol.registry import all_methods
from flwr_distill.simulation import coded
from flwr_distill.task.errors import ReportedError, SettingsError
from tests.matrix import OURS

from .test_runs import NODE, NODES, TASK, models_of

SMALL = {"down-codec": "delta-int4", "up-codec": "int4"}
TOP = {"down-codec": "delta-topk", "up-codec": "topk"}


@pytest.fixture
def run(tmp_path, little_distillation):
    """Runs in this process, in a folder of its own; gives the run's folder."""

    def run(folder, **config):
        config = {**TASK, **little_distillation, "fraction-evaluate": 1.0, **config}
        run_in_process(config, [NODE] * NODES, tmp_path / folder)
        return tmp_path / folder / "1"

    return run


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_coded_run_sends_a_fraction_and_learns_as_much(run):
    plain = rows(run("plain", strategy="fedavg", **{"num-rounds": 6}))
    small = rows(run("small", strategy="fedavg", **{"num-rounds": 6}, **SMALL))
    # With the first model, which nodes get whole: 0.111 if that were of 16 bits a weight.
    assert small[-1]["server_bytes"] < 0.105 * plain[-1]["server_bytes"]
    assert small[-1]["accuracy"] > plain[-1]["accuracy"] - 0.03


@pytest.mark.parametrize("codecs", [SMALL, TOP], ids=["int4", "topk"])
def test_a_resumed_run_ends_with_the_same_model(codecs, run):
    config = {"strategy": "fedavg", "fraction-train": 0.5, **codecs}
    whole = run("whole", **config, **{"num-rounds": 4})
    run("parts", **config, **{"num-rounds": 2})
    parts = run("parts", **config, **{"num-rounds": 4}, resume="latest")
    assert models_of(parts) == models_of(whole)


def test_a_node_that_lost_its_files_gets_the_whole_model(run, monkeypatch):
    """Once; its failed message says what it is missing."""
    lost = []
    receive = coded.NodeCodec.receive

    def forgetful(self, message):
        about, record = message.metadata, message.content.config_records.get(CODEC)
        if not lost and record and record["base"] and about.message_type == "train":
            lost.append(record["base"])
            self._state_dir = f"{self._state_dir}-elsewhere"
        return receive(self, message)

    monkeypatch.setattr(coded.NodeCodec, "receive", forgetful)
    folder = run("lost", strategy="fedavg", **{"num-rounds": 4}, **SMALL)
    report = (folder / "journal.jsonl").read_text()
    assert lost
    assert report.count("no longer has the model") >= 1
    assert [row["accuracy"] is not None for row in rows(folder)] == [True] * 5


SCAFFOLD = {"strategy": "scaffold", "train.lr": 0.05, "partition.classes": 5}


def test_control_variates_are_coded_and_a_run_learns_as_much(run):
    config = {**SCAFFOLD, "num-rounds": 15}
    plain, small = rows(run("plain", **config)), rows(run("small", **config, **SMALL))
    assert small[-1]["server_bytes"] < 0.135 * plain[-1]["server_bytes"]
    assert plain[-1]["accuracy"] > 0.6
    assert small[-1]["accuracy"] > plain[-1]["accuracy"] - 0.02
    assert small[-1]["set_aside"] == 0


def test_what_many_virtual_nodes_decode_is_in_memory_once(tmp_path):
    """A thousand nodes had a thousand copies, and as many files for workers."""
    got = {}

    def keeping(place, node):
        def answer(message):
            if message.metadata.message_type == "train":
                number = message.content["config"]["server-round"]
                for name, record in message.content.array_records.items():
                    got.setdefault((number, name), []).append(record)
            return node(message)

        return answer

    run_in_process({**TASK, **SCAFFOLD, **SMALL}, [NODE] * NODES, tmp_path, wrap=keeping)
    assert {(2, ARRAYS), (2, "control-variate")} <= got.keys()
    assert {len(records) for records in got.values()} == {NODES}
    assert {len({id(record) for record in records}) for records in got.values()} == {1}


@pytest.mark.parametrize("codecs", [SMALL, TOP], ids=["int4", "topk"])
def test_a_resumed_run_with_coded_variates_ends_with_the_same_model(codecs, run):
    config = {**SCAFFOLD, "fraction-train": 0.5, **codecs}
    whole = run("whole", **config, **{"num-rounds": 4})
    run("parts", **config, **{"num-rounds": 2})
    parts = run("parts", **config, **{"num-rounds": 4}, resume="latest")
    assert models_of(parts) == models_of(whole)


@pytest.mark.parametrize(
    "odd",
    [
        Array("float32", (1 << 40,), f"{PREFIX}int8", b"x"),
        Array("float32", (64, 32), f"{PREFIX}topk", b"x"),
    ],
    ids=["huge", "bytes"],
)
def test_a_node_whose_coded_variate_is_unreadable_harms_nobody_else(odd, tmp_path, monkeypatch):
    encode = coded.NodeCodec.encode

    def hostile(self, reply):
        records = encode(self, reply)
        if records and reply.metadata.src_node_id == victims[0]:
            records["control-variate"] = ArrayRecord({"w": odd})
        return records

    victims = []

    def noting(self, message):
        victims.append(message.metadata.dst_node_id)
        return receive(self, message)

    receive = coded.NodeCodec.receive
    monkeypatch.setattr(coded.NodeCodec, "receive", noting)
    monkeypatch.setattr(coded.NodeCodec, "encode", hostile)
    run_in_process({**TASK, **SCAFFOLD, **SMALL}, [NODE] * NODES, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "1" / "journal.jsonl").open()]
    trained = [line for line in lines if line.get("phase") == "train" and "nodes" in line]
    assert [len(line["nodes"]) for line in trained] == [NODES - 1] * TASK["num-rounds"]


DEFENDED = {"defence": "on"}
PRIVATE = {"train.dp-noise": 1.0, "train.dp-clip": 1.0}
EIGHT = {"down-codec": "int8", "up-codec": "float16"}
HALF = {"down-codec": "float32", "up-codec": "bfloat16"}
ALWAYS = {
    *((strategy, "small", "plain") for strategy in OURS),
    ("cadis", "small", "defended"),
    ("fedavg", "small", "private"),
}


@pytest.mark.parametrize(
    ("strategy", "codecs", "more"),
    [
        pytest.param(s, c, m, marks=() if (s, c, m) in ALWAYS else pytest.mark.matrix)
        for s in sorted(all_methods())
        for c in ("small", "top", "eight", "half")
        for m in ("plain", "defended", "private")
    ],
)
def test_what_runs_without_codecs_runs_with_them(strategy, codecs, more, run):
    config = {"strategy": strategy, "num-rounds": 2}
    config |= {"plain": {}, "defended": DEFENDED, "private": PRIVATE}[more]
    try:
        plain = rows(run("without", **config))[-1]
    except ReportedError as error:
        pytest.skip(f"it does not run without: {error}")
    config |= {"small": SMALL, "top": TOP, "eight": EIGHT, "half": HALF}[codecs]
    last = rows(run("with", **config))[-1]
    assert last["round"] == 2
    assert last["set_aside"] <= plain["set_aside"]
    assert last["server_bytes"] <= plain["server_bytes"]


def test_secure_sums_take_codecs_of_models_to_nodes_alone(run):
    sums = {"strategy": "fedavg", "secure-sums": True, "down-codec": "delta-int8"}
    assert rows(run("down", **sums))[-1]["accuracy"]
    with pytest.raises(SettingsError, match="up-codec"):
        run("up", **sums, **{"up-codec": "int8"})


@pytest.mark.parametrize("codecs", [SMALL, {}], ids=["coded", "plain"])
@pytest.mark.parametrize(
    "odd",
    [
        lambda array: Array(array.dtype, array.shape, f"{PREFIX}int8", b"x"),
        lambda array: Array(array.dtype, array.shape, 5, b"x"),
        lambda array: Array(array.dtype, None, f"{PREFIX}int8", b"x"),
    ],
    ids=["bytes", "codec", "shape"],
)
def test_a_node_whose_coded_model_is_unreadable_harms_nobody_else(odd, codecs, tmp_path):
    def hostile(place, node):
        def answer(message):
            content = node(message)
            if place == 0 and message.metadata.message_type == "train":
                name, array = next(iter(content[ARRAYS].items()))
                content[ARRAYS][name] = odd(array)
            return content

        return answer

    config = {**TASK, "strategy": "fedavg", **codecs}
    run_in_process(config, [NODE] * NODES, tmp_path, wrap=hostile)
    lines = [json.loads(line) for line in (tmp_path / "1" / "journal.jsonl").open()]
    trained = [line for line in lines if line.get("phase") == "train" and "nodes" in line]
    assert [len(line["nodes"]) for line in trained] == [NODES - 1] * TASK["num-rounds"]


def test_nodes_without_codecs_get_plain_models_and_are_named(run, monkeypatch):
    named = []
    monkeypatch.setattr("flwr_distill.node.codec.OWN_CODECS", ())
    monkeypatch.setattr("flwr_distill.server.grid.codec.log", lambda *line: named.append(line))
    plain, small = (
        run(name, strategy="fedavg", **more) for name, more in (("a", {}), ("b", SMALL))
    )
    assert rows(plain)[-1]["server_bytes"] == rows(small)[-1]["server_bytes"]
    assert models_of(plain) == models_of(small)
    assert [all(f"node-{n}" in str(line) for n in range(NODES)) for line in named] == [True]
