"""The node's end of a coded link: what it keeps, and messages that it does not decode."""

import shutil
import tracemalloc

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict

from flwr_distill.node.codec import NodeCodec
from flwr_distill.protocol.arrays import DecodedArray, as_arrays, as_record, num_bytes
from flwr_distill.protocol.codecs import CodecError
from flwr_distill.protocol.coded import (
    CODEC,
    PREFIX,
    Coding,
    coded,
    decoded,
    unchanged,
    version_of,
)
from flwr_distill.protocol.meeting import DESCRIBE
from flwr_distill.protocol.messages import ARRAYS, CONFIG
from flwr_distill.protocol.replies import REFUSED
from flwr_distill.task.errors import SettingsError

START = {"w": np.random.default_rng(0).standard_normal((30, 40)).astype(np.float32)}


def message(record, **about):
    coding = Coding(**{"version": version_of(START), **about})
    content = {ARRAYS: record, CODEC: ConfigRecord(coding.model_dump(by_alias=True))}
    made = Message(RecordDict(content), 7, "train")
    made.metadata.__dict__["_run_id"] = 5
    return made


def trained(codec, server_round, received):
    """What the server decodes of a node's reply in a round, and the bytes saved."""
    sent = message(as_record(START), up="topk", round=server_round, received=received)
    assert codec.receive(sent)
    change = np.random.default_rng(server_round).standard_normal((30, 40)).astype(np.float32)
    reply = Message(RecordDict({ARRAYS: as_record({"w": START["w"] + change})}), reply_to=sent)
    before, records = num_bytes(reply.content[ARRAYS]), codec.encode(reply)
    saved = before - num_bytes(records[ARRAYS])
    return as_arrays(decoded(codec.finish(reply, records, sent).content[ARRAYS], START))["w"], saved


def answered(codec, sent):
    """The reply that leaves when the app sends the model back."""
    codec.receive(sent)
    reply = Message(RecordDict({ARRAYS: as_record(START)}), reply_to=sent)
    return codec.finish(reply, codec.encode(reply), sent)


def test_of_a_reply_that_was_lost_nothing_is_left_out_later(tmp_path):
    lost, never = NodeCodec(tmp_path / "lost"), NodeCodec(tmp_path / "never")
    for codec in (lost, never):
        saved = trained(codec, 1, -1)[1]
        assert saved > 0.9 * START["w"].nbytes
    trained(lost, 2, 1)
    again, as_if_never = (trained(codec, 3, 1)[0] for codec in (lost, never))
    np.testing.assert_array_equal(again, as_if_never)
    counted = NodeCodec(tmp_path / "counted")
    for server_round in (1, 2):
        trained(counted, server_round, server_round - 1)
    assert (trained(counted, 3, 2)[0] != again).any()


def test_another_process_of_the_node_has_what_the_first_kept(tmp_path):
    one, other = NodeCodec(tmp_path / "one"), NodeCodec(tmp_path / "other")
    for codec in (one, other):
        trained(codec, 1, -1)
    restarted = NodeCodec(tmp_path / "one")
    pairs = (trained(codec, 2, 1)[0] for codec in (restarted, other))
    np.testing.assert_array_equal(*pairs)


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.unlink(),
        lambda file: file.write_bytes(b"{}"),
        lambda file: file.write_bytes(file.read_bytes()[:-4] + bytes(4)),
    ],
    ids=["gone", "no arrays", "changed"],
)
def test_a_model_that_is_no_longer_there_is_named_and_nothing_is_built_on_it(damage, tmp_path):
    codec = NodeCodec(tmp_path)
    answered(codec, message(as_record(START)))
    (file,) = tmp_path.rglob("links/models/*")
    damage(file)
    record, _ = coded(as_record(START), "int8", np.random.default_rng(0), START)
    with pytest.raises(CodecError, match="no longer has the model"):
        codec.receive(message(record, base=version_of(START)))


def test_a_damaged_model_is_replaced_by_the_next_whole_one(tmp_path):
    """Else each model that builds on it fails, whole ones in between or not."""
    codec, same = NodeCodec(tmp_path), message(unchanged(START), base=version_of(START))
    answered(codec, message(as_record(START)))
    (file,) = tmp_path.rglob("links/models/*")
    file.write_bytes(file.read_bytes()[:-1])
    answered(codec, message(as_record(START)))
    assert answered(codec, same).has_content()


def test_a_message_that_does_not_give_the_servers_model_is_not_trained(tmp_path):
    other = {"w": START["w"] + 1}
    with pytest.raises(CodecError, match="not the one that the server coded"):
        NodeCodec(tmp_path).receive(message(as_record(other)))


@pytest.mark.parametrize(
    "array",
    [
        Array("float32", (1 << 40,), PREFIX + "int8", b"x"),
        Array("float32", (-(1 << 40),), PREFIX + "int8", b"x"),
        Array("float32", (30, 40), PREFIX + "same", b""),
    ],
    ids=["huge", "negative", "same as nothing"],
)
def test_a_hostile_model_is_an_error(array, tmp_path):
    with pytest.raises(CodecError):
        NodeCodec(tmp_path).receive(message(ArrayRecord({"w": array})))


def test_a_record_that_is_no_coding_is_an_error(tmp_path):
    sent = message(as_record(START))
    sent.content[CODEC]["up"] = "int9"
    with pytest.raises((CodecError, SettingsError)):
        NodeCodec(tmp_path).receive(sent)


def test_a_message_without_a_codec_passes_unchanged(tmp_path):
    sent = Message(RecordDict({ARRAYS: as_record(START)}), 7, "train")
    codec = NodeCodec(tmp_path)
    assert not codec.receive(sent)
    reply = Message(RecordDict({ARRAYS: as_record(START)}), reply_to=sent)
    assert codec.encode(reply) == {}
    assert codec.finish(reply, {}, sent) is reply
    assert not list(tmp_path.rglob("models"))


def test_nothing_is_kept_of_a_message_that_is_refused(tmp_path):
    """Else a server could fill the disk of a node that refuses all its messages."""
    codec, sent = NodeCodec(tmp_path), message(as_record(START), up="topk")
    codec.receive(sent)
    refusal = Message(Error(REFUSED, "the node's policy refuses it"), reply_to=sent)
    assert codec.encode(refusal) == {}
    assert codec.finish(refusal, {}, sent) is refusal
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


@pytest.mark.parametrize("shape", [(1 << 80, 40), ("a",), (-30, 40)], ids=str)
def test_arrays_of_any_shape_that_an_app_claims_leave_as_they_are(shape, tmp_path):
    codec, sent = NodeCodec(tmp_path), message(as_record(START), up="int8")
    codec.receive(sent)
    reply = Message(RecordDict({ARRAYS: as_record(START)}), reply_to=sent)
    array = reply.content[ARRAYS]["w"]
    array.shape = shape
    model = codec.encode(reply)
    left = codec.finish(reply, model, sent)
    assert left.content[ARRAYS]["w"].data == array.data


@pytest.mark.parametrize("name", ["left-out-train@000001", "links/models", "links"])
def test_what_an_app_puts_in_the_way_costs_its_reply_alone(name, tmp_path):
    codec = NodeCodec(tmp_path)
    trained(codec, 1, -1)
    (folder,) = tmp_path.glob("runs/5/7")
    untrusted = folder / name
    shutil.rmtree(untrusted) if untrusted.is_dir() else untrusted.unlink()
    if name.startswith("left"):
        (untrusted / "inside").mkdir(parents=True)
        assert trained(codec, 1, -1)[1] > 0
    else:
        untrusted.write_bytes(b"")
        sent = message(as_record(START))
        assert answered(codec, sent).has_error()
        untrusted.unlink()
    assert not answered(codec, message(as_record(START))).has_error()


def test_a_blob_larger_than_the_model_is_not_read_whole(tmp_path):
    codec = NodeCodec(tmp_path)
    trained(codec, 1, -1)
    (file,) = tmp_path.rglob("left-out-train@000001")
    with file.open("r+b") as opened:
        opened.truncate(1 << 40)  # a hole: reading it all would end this process
    assert trained(codec, 2, 1)[1] > 0


@pytest.mark.parametrize("loopback", [True, False])
def test_what_connects_the_app_says_whether_the_link_is_loopback_not_the_app(loopback, tmp_path):
    sent = Message(RecordDict(), 7, DESCRIBE)
    codec = NodeCodec(tmp_path, loopback=loopback)
    codec.receive(sent)
    reply = Message(RecordDict({CONFIG: ConfigRecord({"loopback": not loopback})}), reply_to=sent)
    assert codec.finish(reply, {}, sent).content[CONFIG]["loopback"] is loopback


def test_a_description_with_an_odd_record_says_that_there_are_codecs(tmp_path):
    sent = Message(RecordDict(), 7, DESCRIBE)
    codec = NodeCodec(tmp_path)
    codec.receive(sent)
    reply = Message(RecordDict({CONFIG: ArrayRecord()}), reply_to=sent)
    assert codec.finish(reply, {}, sent).content[CONFIG]["codecs"]


def test_a_model_with_single_numbers_is_kept_as_it_came(tmp_path):
    """Batch normalisation counts batches in arrays without a dimension."""
    counted = {**START, "bn.num_batches_tracked": np.array(3)}
    codec, version = NodeCodec(tmp_path), version_of(counted)
    answered(codec, message(as_record(counted), version=version))
    again = message(unchanged(counted), version=version, base=version)
    assert codec.receive(again)
    found = as_arrays(again.content[ARRAYS])
    assert {name: array.shape for name, array in found.items()} == {
        name: array.shape for name, array in counted.items()
    }


VARIATE = "control-variate"


def beside(codec, server_round, received, change):
    """What the server decodes of a record beside the model."""
    sent = message(as_record(START), up="int4", round=server_round, received=received, seed=5)
    sent.content[CODEC]["beside"] = [VARIATE]
    sent.content[VARIATE] = coded(as_record(START), "float16", np.random.default_rng(0))[0]
    assert codec.receive(sent)
    np.testing.assert_allclose(as_arrays(sent.content[VARIATE])["w"], START["w"], rtol=2**-10)
    content = RecordDict({ARRAYS: as_record(START), VARIATE: as_record({"w": change})})
    reply = Message(content, reply_to=sent)
    records = codec.encode(reply)
    assert records[VARIATE]["w"].stype == f"{PREFIX}int4"
    return as_arrays(decoded(codec.finish(reply, records, sent).content[VARIATE]))["w"]


def test_what_is_sent_beside_models_adds_up_though_each_is_rounded(tmp_path):
    """Else a server's sum of changes would drift from the nodes' own ones."""
    codec, rng, turns = NodeCodec(tmp_path), np.random.default_rng(1), 30
    changes = [rng.standard_normal((30, 40)).astype(np.float32) for _ in range(turns)]
    sums = np.zeros((30, 40), np.float32)
    for turn, change in enumerate(changes, 1):
        sums += beside(codec, turn, turn - 1, change)
    rounding = np.abs(changes).max(axis=(0, 2))[:, None] / 7
    assert (np.abs(sums - np.sum(changes, axis=0)) < 2 * rounding).all()


def alone(codec, arrays, base=""):
    """The record that answers a message without a model."""
    sent = message(ArrayRecord(), version="", up="int4", base=base)
    del sent.content[ARRAYS]
    assert codec.receive(sent)
    assert not sent.content
    reply = Message(RecordDict({ARRAYS: as_record(arrays)}), reply_to=sent)
    return codec.finish(reply, codec.encode(reply), sent).content[ARRAYS]


def test_an_answer_to_a_message_without_a_model_is_a_difference_to_the_last_one(tmp_path):
    codec, moved = NodeCodec(tmp_path), {"w": START["w"] + np.float32(0.01)}
    answered(codec, message(as_record(START)))
    record = alone(codec, moved, version_of(START))
    assert record["w"].stype == f"{PREFIX}int4"
    np.testing.assert_allclose(as_arrays(decoded(record, START))["w"], moved["w"], atol=0.01)
    assert answered(codec, message(as_record(START))).has_content()


@pytest.mark.parametrize("base", ["", version_of(START), "0" * 64], ids=["none", "other", "lost"])
def test_what_is_unlike_the_last_model_is_packed_without_loss(base, tmp_path):
    codec = NodeCodec(tmp_path)
    answered(codec, message(as_record(START)))
    logits = np.random.default_rng(2).random((300, 10), np.float32)
    labels = {"soft-labels": logits / logits.sum(axis=1, keepdims=True)}
    record = alone(codec, labels, base)
    assert len(record["soft-labels"].data) < 0.9 * labels["soft-labels"].nbytes
    found = as_arrays(decoded(record, {}))["soft-labels"]
    np.testing.assert_array_equal(found, labels["soft-labels"])


@pytest.mark.parametrize("name", ["../../w", "a/b", "", "x" * 41, "."])
def test_a_record_whose_name_would_be_another_file_is_refused(name, tmp_path):
    sent = message(as_record(START), up="int8")
    sent.content[CODEC]["beside"] = [name]
    with pytest.raises((CodecError, SettingsError)):
        NodeCodec(tmp_path).receive(sent)


@pytest.mark.parametrize("arrays", [{"w": np.zeros(3, np.longdouble)}, {"\ud800": np.zeros(3)}])
def test_a_model_that_no_file_holds_costs_the_reply_and_not_the_node(arrays, tmp_path):
    codec, model = NodeCodec(tmp_path), as_record(arrays)
    sent = message(model, version=version_of(as_arrays(model)))
    assert codec.receive(sent)
    reply = Message(RecordDict({ARRAYS: model}), reply_to=sent)
    assert codec.finish(reply, codec.encode(reply), sent).has_error()


def test_a_message_whose_task_has_ended_is_not_taken_for_the_next(tmp_path):
    codec = NodeCodec(tmp_path)
    codec.receive(message(as_record(START), up="int8"))
    codec.forget()
    reply = Message(RecordDict({ARRAYS: as_record(START)}), reply_to=message(as_record(START)))
    assert codec.encode(reply) == {}


def test_one_array_under_many_names_is_coded_in_the_memory_of_one(tmp_path):
    names, zeros = [f"w{number}" for number in range(50)], np.zeros(10**6, np.float32)
    start = dict.fromkeys(names, zeros)
    codec = NodeCodec(tmp_path)
    record = ArrayRecord()
    for name in names:
        record[name] = DecodedArray(zeros)
    codec.receive(message(record, up="float16", version=version_of(start)))
    shared = Array(zeros)
    reply = Message(RecordDict({ARRAYS: ArrayRecord()}), reply_to=message(record))
    for name in names:
        reply.content[ARRAYS][name] = shared
    tracemalloc.start()
    try:
        assert codec.encode(reply)[ARRAYS].keys() == set(names)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * zeros.nbytes
