"""The server's end of coded links: what a reply may become, and what is kept of nodes."""

import gc
import weakref

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from flwr_distill.node.codec import NodeCodec
from flwr_distill.protocol.arrays import as_arrays, as_record
from flwr_distill.protocol.codecs import EXACT, CodecError
from flwr_distill.protocol.coded import BESIDE, coded
from flwr_distill.protocol.messages import ARRAYS
from flwr_distill.server.grid.codec import MAX_VERSIONS, ModelCodec, codec_of_run
from flwr_distill.server.settings import RunSettings

ASK = "train.ask"
MOST = 10**9


def noise(seed, size=1000):
    return {"w": np.random.default_rng(seed).standard_normal(size).astype(np.float32)}


def codec_for(nodes):
    codec = ModelCodec(up="int8", beside=("variate",), answered={ASK})
    codec.meet({node: str(node) for node in nodes}, dict.fromkeys(nodes, (BESIDE, "int8")))
    return codec


def push(codec, node, kind, content, number=0):
    message = Message(RecordDict(content), node, kind)
    message.metadata.__dict__["_message_id"] = f"{kind}-{node}-{number}"
    with codec.coding([message]):
        pass
    return message


def packed(arrays):
    return coded(as_record(arrays), EXACT, np.random.default_rng(0))[0]


@pytest.mark.parametrize("name", [ARRAYS, "variate"])
def test_a_reply_to_a_model_is_not_packed_without_loss(name):
    """What such arrays unpack to is bounded by their own bytes alone."""
    codec = codec_for([1])
    message = push(codec, 1, "train", {ARRAYS: as_record(noise(0)), "variate": as_record(noise(1))})
    reply = Message(RecordDict({name: packed({"x": noise(2)["w"]})}), reply_to=message)
    with pytest.raises(CodecError):
        codec.decode(message, reply, MOST)


@pytest.mark.parametrize(("most", "is_read"), [(4000, True), (3999, False)])
def test_an_answer_to_a_message_without_a_model_unpacks_to_what_a_reply_may_have(most, is_read):
    codec = codec_for([1])
    message = push(codec, 1, ASK, {"config": ConfigRecord({"a": 1})})
    reply = Message(RecordDict({ARRAYS: packed(noise(0))}), reply_to=message)
    if is_read:
        codec.decode(message, reply, most)
        np.testing.assert_array_equal(reply.content[ARRAYS]["w"].numpy(), noise(0)["w"])
    else:
        with pytest.raises(CodecError):
            codec.decode(message, reply, most)


def test_models_to_which_answers_are_differences_do_not_pile_up_over_rounds():
    """Each round another node is asked, and none answers."""
    rounds, models = 3 * MAX_VERSIONS, []
    codec = codec_for(range(rounds))
    for number in range(rounds):
        codec.round = number
        model = as_record(noise(number))
        message = push(codec, number, "train", {ARRAYS: model}, number)
        codec.note(Message(RecordDict({ARRAYS: ArrayRecord()}), reply_to=message), counts=True)
        push(codec, number, ASK, {"config": ConfigRecord({"a": 1})}, number)
        models.append(weakref.ref([*codec._versions.values()][-1].arrays["w"]))
    gc.collect()
    assert len(codec._asked) == rounds
    assert sum(kept() is not None for kept in models) <= MAX_VERSIONS + 1


@pytest.mark.parametrize("up", ["float32", "int8"])
def test_what_coding_loses_on_the_way_to_nodes_is_not_lost_of_the_model(up, tmp_path):
    """Whether a node's reply is coded or not: a step below the last bit of a value still counts."""
    server, node, model = ModelCodec(down="bfloat16", up=up), NodeCodec(tmp_path), noise(0)
    server.meet({1: "1"}, {1: (BESIDE, "bfloat16", "int8")})
    message = Message(RecordDict({ARRAYS: as_record(model)}), 1, "train")
    message.metadata.__dict__.update(_message_id="1", _run_id=5)
    with server.coding([message]):
        sent = Message(RecordDict(dict(message.content)), 1, "train")
    sent.metadata.__dict__.update(vars(message.metadata))
    assert node.receive(sent)
    received = as_arrays(sent.content[ARRAYS])["w"]
    assert not np.array_equal(received, model["w"])
    reply = Message(
        RecordDict({ARRAYS: as_record({"w": received + np.float32(1e-4)})}), reply_to=sent
    )
    reply = node.finish(reply, node.encode(reply), sent)
    server.decode(message, reply, MOST)
    found = as_arrays(reply.content[ARRAYS])["w"]
    np.testing.assert_allclose(found - model["w"], 1e-4, atol=2e-6)


@pytest.mark.parametrize("late", [1, MAX_VERSIONS, 2 * MAX_VERSIONS])
def test_of_a_late_reply_too_nothing_is_lost_that_coding_loses_on_the_way(late):
    """As with `buffer`, where a node may train while many rounds end without it."""
    settings = RunSettings(strategy="fedavg", buffer=1, max_staleness=late, down_codec="bfloat16")
    codec = codec_of_run(settings)
    nodes = range(1, late + 2)
    codec.meet({node: str(node) for node in nodes}, dict.fromkeys(nodes, (BESIDE, "bfloat16")))
    message = push(codec, 1, "train", {ARRAYS: as_record(noise(0))})
    received = [*codec._versions.values()][-1].arrays["w"]
    for node in nodes[1:]:  # one in each further round
        push(codec, node, "train", {ARRAYS: as_record(noise(node))})
    moved = as_record({"w": received + np.float32(1e-4)})
    reply = Message(RecordDict({ARRAYS: moved}), reply_to=message)
    codec.decode(message, reply, MOST)
    found = as_arrays(reply.content[ARRAYS])["w"]
    np.testing.assert_allclose(found - noise(0)["w"], 1e-4, atol=2e-6)


def test_what_is_beside_a_model_may_be_larger_than_it():
    """As two moments of each weight are; what any reply may have bounds it."""
    codec = codec_for([1])
    message = push(codec, 1, "train", {ARRAYS: as_record(noise(0)), "variate": as_record(noise(1))})
    moments = coded(as_record(noise(2, size=3000)), "int8", np.random.default_rng(0))[0]
    for most, is_read in ((12_000, True), (11_999, False)):
        reply = Message(RecordDict({"variate": moments}), reply_to=message)
        if is_read:
            codec.decode(message, reply, most)
            assert reply.content["variate"]["w"].numpy().shape == (3000,)
        else:
            with pytest.raises(CodecError):
                codec.decode(message, reply, most)


def test_models_of_several_sizes_in_turn_reach_a_node(tmp_path):
    """As a whole model and its head alone do; none is built on one that is unlike it."""
    server, node = ModelCodec(down="delta-int8", up="int8"), NodeCodec(tmp_path)
    server.meet({1: "1"}, {1: ("int8",)})
    large = noise(0, size=600_000)
    for number, model in enumerate([large, noise(1), large, noise(2), noise(3)]):
        message = Message(RecordDict({ARRAYS: as_record(model)}), 1, "train")
        message.metadata.__dict__.update(_message_id=str(number), _run_id=5)
        with server.coding([message]):
            sent = Message(RecordDict(dict(message.content)), 1, "train")
        sent.metadata.__dict__.update(vars(message.metadata))
        assert node.receive(sent)
        trained = {"w": as_arrays(sent.content[ARRAYS])["w"] + np.float32(1)}
        reply = Message(RecordDict({ARRAYS: as_record(trained)}), reply_to=sent)
        reply = node.finish(reply, node.encode(reply), sent)
        server.decode(message, reply, MOST)
        server.note(reply, counts=reply.has_content())
        np.testing.assert_allclose(reply.content[ARRAYS]["w"].numpy(), model["w"] + 1, atol=0.02)


@pytest.mark.parametrize(("with_base", "most"), [(0, 0.25), (5, 0.25), (9, 0.21), (10, 0.13)])
def test_a_round_is_never_mostly_exact_models(with_base, most):
    """Ten nodes, of which so many have taken part: bytes on the way down, of those of float32."""
    server, nodes = ModelCodec(down="delta-int4", up="int4"), range(10)
    server.meet({node: str(node) for node in nodes}, dict.fromkeys(nodes, ("int4",)))
    first, second = noise(0, size=10_000), noise(1, size=10_000)
    for message, _ in sent_together(server, first, nodes[:with_base]):
        server.note(Message(RecordDict({ARRAYS: ArrayRecord()}), reply_to=message), counts=True)
    sizes = [size for _, size in sent_together(server, second, nodes)]
    assert sum(sizes) < most * len(nodes) * second["w"].nbytes


def sent_together(server, model, nodes):
    """A round's messages, and the bytes of the model in each as it was sent."""
    record = as_record(model)
    messages = [Message(RecordDict({ARRAYS: record}), node, "train") for node in nodes]
    for message in messages:
        message.metadata.__dict__["_message_id"] = f"{message.metadata.dst_node_id}-{id(record)}"
    with server.coding(messages):
        sizes = [len(message.content[ARRAYS]["w"].data) for message in messages]
    return list(zip(messages, sizes, strict=True))
