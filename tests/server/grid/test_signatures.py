"""Replies that nodes sign, for a SuperLink that does not compare who sends them."""

import json
import os
import time

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.proto.message_pb2 import Metadata

from flwr_distill.flower.line_1_32.server import inbox as signatures
from flwr_distill.flower.line_1_32.server.inbox import KEYS_VARIABLE, NodeKeys
from flwr_distill.protocol.signatures import is_signed, sign
from tests.grids import plain_grid

NODE = 2**64 - 17
KEY, OTHER = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
FIELDS = {
    "run_id": 2**63 + 5,
    "src_node_id": NODE,
    "reply_to_message_id": "a" * 64,
    "message_id": "b" * 64,
}


def header(**changed):
    return Metadata(**FIELDS | changed, group_id="3#0123")


def signed(key=KEY, **changed):
    made = header(**changed)
    sign(made, key)
    return made


def public_text(key):
    form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    return key.public_key().public_bytes(*form).decode()


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "nodes.json"
    file.write_text(json.dumps({NODE: public_text(KEY)}))
    return file


def test_a_signature_follows_the_group_and_is_the_keys():
    assert signed().group_id.startswith("3#0123")
    assert is_signed(signed(), KEY.public_key())
    assert not is_signed(signed(OTHER), KEY.public_key())
    assert not is_signed(header(), KEY.public_key())


def test_a_reply_that_is_signed_again_before_it_is_sent_again_is_signed():
    again = signed()
    sign(again, KEY)
    assert is_signed(again, KEY.public_key())


@pytest.mark.parametrize("field", FIELDS)
def test_a_signature_is_for_this_reply_alone(field):
    moved = signed()
    setattr(moved, field, 7 if isinstance(FIELDS[field], int) else "c" * 64)
    assert not is_signed(moved, KEY.public_key())


@pytest.mark.parametrize("group", ["", "~", "~~", "3#0123~not base64!", "~AAAA", "~\u00e9"])
def test_what_is_no_signature_counts_as_none(group):
    made = header()
    made.group_id = group
    assert not is_signed(made, KEY.public_key())


def test_a_known_node_must_have_signed_and_an_unknown_one_need_not(file):
    keys = NodeKeys(file)
    assert keys.accept(signed())
    assert not keys.accept(signed(OTHER))
    assert not keys.accept(header())
    assert keys.accept(header(src_node_id=5))


def test_nodes_that_register_later_are_known_then(file):
    keys = NodeKeys(file)
    assert keys.accept(header(src_node_id=5))
    file.write_text(json.dumps({5: public_text(OTHER)}))
    os.utime(file, ns=(1, 1))
    assert not keys.accept(header(src_node_id=5))
    assert keys.accept(signed(OTHER, src_node_id=5))


@pytest.mark.parametrize("text", [None, "", "[]", '{"five": "x"}', '{"5": "x"}', '{"5": 1}'])
def test_a_file_that_cannot_be_read_ends_the_run_with_the_remedy(text, tmp_path, monkeypatch):
    file = tmp_path / "nodes.json"
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv(KEYS_VARIABLE, str(file))
    with pytest.raises(RuntimeError, match=rf"{KEYS_VARIABLE} = .*nodes\.json.*register"):
        NodeKeys.from_environment()


def words(text):
    return lambda message: RecordDict({"told": ConfigRecord({"words": text})})


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
def test_the_grid_takes_replies_of_known_nodes_only_with_their_signature(
    superlink, together, file, monkeypatch, caplog
):
    link = superlink(
        words("signed"), words("forged"), words("none"), lambda m: Error(2, "x"), together=together
    )
    file.write_text(json.dumps(dict.fromkeys(link.ids, public_text(KEY))))
    monkeypatch.setenv(KEYS_VARIABLE, str(file))
    keys = dict(zip(link.ids, [KEY, OTHER, None, KEY], strict=True))
    pull = link.grid._stub.PullMessages

    def with_signatures(request):  # as if nodes had sent them to the SuperLink
        response = pull(request)
        for reply in response.messages_list:
            if (key := keys.get(reply.metadata.src_node_id)) is not None:
                sign(reply.metadata, key)
        return response

    monkeypatch.setattr(link.grid._stub, "PullMessages", with_signatures)
    grid = plain_grid(link.grid, deadline=5)
    replies = grid.send_and_receive([Message(RecordDict(), node, "train") for node in link.ids])
    taken = {
        reply.metadata.src_node_id: reply.content["told"]["words"]
        for reply in replies
        if reply.has_content()
    }
    assert taken == {link.ids[0]: "signed"}
    for node in link.ids[1:3]:  # no reply of theirs can come any more, and the SuperLink says so
        assert grid.failures[node][0] == "it is not signed with the node's key"
    assert len(link.store) == 0


def test_a_check_takes_less_than_a_millisecond(file, monkeypatch):
    keys, reply = NodeKeys(file), signed()
    monkeypatch.setattr(signatures.json, "loads", lambda text: pytest.fail("it is read once"))
    start = time.perf_counter()
    for _ in range(100):
        assert keys.accept(reply)
    assert time.perf_counter() - start < 0.1 * 5  # other tests run beside this one
