"""A registered node that speaks for others: replies, objects, confirmations, life signs.

The attacker has a key of its own that the SuperLink admits, and Flower's own stub. It knows the
other nodes' ids and keys, which are no secrets, and here the ids of their messages, which are.
"""

import time
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ArrayRecord, ConfigRecord, Message, Metadata, RecordDict
from flwr.app.message import make_message, remove_content_from_message
from flwr.client.grpc_rere_client.node_auth_client_interceptor import NodeAuthClientInterceptor
from flwr.common.constant import (
    FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE,
    NOOP_FLWR_AID,
    SUPERLINK_NODE_ID,
)
from flwr.common.serde import message_to_proto
from flwr.proto import fleet_pb2
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.fleet_pb2_grpc import FleetStub, add_FleetServicer_to_server
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.server import app as app_of_flower
from flwr.server.superlink.fleet.grpc_rere.node_auth_server_interceptor import (
    NodeAuthServerInterceptor,
)
from flwr.server.superlink.linkstate import linkstate_factory
from flwr.supercore.constant import NOOP_FEDERATION
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import NoObjectInStoreError, object_store_factory
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.servicer.serverappio import serverappio_grpc

from flwr_distill.flower.line_1_32.calls import Batches
from flwr_distill.flower.line_1_32.fleet import calls as callers
from flwr_distill.flower.line_1_32.fleet import linkstate

SOON = 10.0
TOGETHER = {"PushMessages", "PushObject", "PullObject", "ConfirmMessageReceived"}


@dataclass(frozen=True)
class Party:
    """A registered node, with its stub alone and its calls together."""

    key: ec.EllipticCurvePrivateKey
    public_key: bytes
    node: Node
    stub: FleetStub
    together: Batches

    @property
    def id(self):
        return self.node.node_id


class SuperLink:
    """What `flwr-distill superlink` serves to nodes, in this process."""

    def __init__(self, monkeypatch, file):
        make = "generic_create_grpc_server"
        for owner, *names in (  # to be restored
            (linkstate_factory, "SqlLinkState", "InMemoryLinkState"),
            (object_store_factory, "SqlObjectStore", "InMemoryObjectStore"),
            (app_of_flower, "FleetServicer", "run_superlink", make),
            (serverappio_grpc, make),
        ):
            for name in names:
                monkeypatch.setattr(owner, name, getattr(owner, name))
        monkeypatch.setattr(app_of_flower, "run_superlink", lambda: None)
        monkeypatch.setattr(linkstate.sys, "setswitchinterval", lambda seconds: None)
        linkstate.main()
        self._file = file
        self.keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
        self.start()
        public_keys = [public_key_to_bytes(key.public_key()) for key in self.keys]
        self.ids = [self.state.create_node(NOOP_FLWR_AID, "", key, 30) for key in public_keys]
        for node in self.ids:
            self.state.activate_node(node, 30.0)
        self.run = self.start_run()

    def start_run(self):
        run = self.state.create_run(
            *(None, None, None, {}, NOOP_FEDERATION, None, None, "flwr-serverapp")
        )
        task = self.state.get_run_info(run_ids=[run])[0].primary_task_id
        self.state.claim_task(task)
        self.state.activate_task(task)
        return run

    def start(self):
        """Start, with what a file holds."""
        if self._file:
            self.store = object_store_factory.SqlObjectStore(str(self._file))
            self.store.initialize()
            self.state = linkstate_factory.SqlLinkState(
                str(self._file), NoOpFederationManager(), self.store
            )
            self.state.initialize()
        else:
            self.store = object_store_factory.InMemoryObjectStore()
            self.state = linkstate_factory.InMemoryLinkState(NoOpFederationManager(), self.store)
        states = SimpleNamespace(state=lambda: self.state)
        servicer = app_of_flower.FleetServicer(
            states, SimpleNamespace(store=lambda: self.store), True
        )
        self.servicer = servicer
        self._server = app_of_flower.generic_create_grpc_server(
            (servicer, add_FleetServicer_to_server),
            server_address="127.0.0.1:0",
            interceptors=[NodeAuthServerInterceptor(states)],
        )
        self._server.start()

    def stop(self):
        self._server.stop(None).wait(SOON)

    @contextmanager
    def party(self, place):
        with grpc.insecure_channel(self._server.bound_address) as channel:
            yield party(channel, self.keys[place], self.ids[place])

    def send(self, place, number):
        """Store a message for a node, as a ServerApp does."""
        message = self.message(place, number)
        self.store.preregister(self.run, get_object_tree(message))
        for name, part in get_all_nested_objects(message).items():
            self.store.put(name, part.deflate())
        assert self.state.store_message_ins(message)
        return message

    def expired(self, place):
        """A message that its node has fetched, and that has expired since."""
        message = self.message(place, number=9, ttl=1.0)
        self.store.preregister(self.run, get_object_tree(message))
        assert self.state.store_message_ins(message)
        with self.party(place) as receiver:
            assert fetch(receiver) == message.object_id
        time.sleep(1.0)
        return message

    def message(self, place, number, ttl=60.0):
        """A message for a node, of which nothing is stored yet."""
        header = Metadata(
            *(self.run, "", SUPERLINK_NODE_ID, self.ids[place]),
            *("", "", time.time(), ttl, "train"),
        )
        message = make_message(header, RecordDict({"arrays": ArrayRecord([np.full(9, number)])}))
        message.metadata.__dict__["_message_id"] = message.object_id
        return message


def party(channel, key, node_id):
    signing = grpc.intercept_channel(channel, NodeAuthClientInterceptor(key, key.public_key()))
    stub = FleetStub(signing)
    public_key = public_key_to_bytes(key.public_key())
    return Party(key, public_key, Node(node_id=node_id), stub, Batches(stub, signing, "Fleet"))


@pytest.fixture(params=["SQLite", "memory"])
def superlink(request, monkeypatch, tmp_path):
    level, filters = linkstate.FLOWER_LOGGER.level, linkstate.FLOWER_LOGGER.filters[:]
    superlink = SuperLink(monkeypatch, tmp_path / "state.db" if request.param == "SQLite" else None)
    yield superlink
    superlink.stop()
    linkstate.FLOWER_LOGGER.setLevel(level)
    linkstate.FLOWER_LOGGER.filters = filters


def reply_to(message, words, sender=None):
    """A reply, in the name of another node if one is given."""
    reply = Message(RecordDict({"answer": ConfigRecord({"words": words})}), reply_to=message)
    if sender is not None:
        reply.metadata.__dict__["_src_node_id"] = sender
    return named_as(reply, reply)


def in_run(run, reply):
    reply.metadata.__dict__["_run_id"] = run
    return named_as(reply, reply)


def named_as(other, reply):
    reply.metadata.__dict__["_message_id"] = other.object_id
    return reply


def fetch(caller):
    (message,) = caller.stub.PullMessages(PullMessagesRequest(node=caller.node)).messages_list
    return message.metadata.message_id


def announce_also(caller, reply, *trees):
    """The request that announces a reply, with further objects."""
    request = push(caller, reply)
    request.message_object_trees[0].children.extend(trees)
    return request


def false(*objects):
    """Trees that say that each of these objects has a part that it does not have."""
    part = ObjectTree(object_id="f" * 64)
    return [ObjectTree(object_id=each.object_id, children=[part]) for each in objects]


def push(caller, *replies, tree=None):
    """The request that announces replies, with their objects or those of another message."""
    return PushMessagesRequest(
        node=caller.node,
        messages_list=[message_to_proto(remove_content_from_message(reply)) for reply in replies],
        message_object_trees=[get_object_tree(tree or reply) for reply in replies],
    )


def objects(caller, message):
    """The requests that store a message's objects."""
    return [
        PushObjectRequest(
            node=caller.node,
            run_id=message.metadata.run_id,
            object_id=name,
            object_content=part.deflate(),
        )
        for name, part in get_all_nested_objects(message).items()
    ]


def named(kind, node, run, message_id):
    key = "message_object_id" if kind is ConfirmMessageReceivedRequest else "object_id"
    return kind(node=node, run_id=run, **{key: message_id})


@dataclass(frozen=True)
class Scene:
    """What an attack may use: two messages that their nodes have fetched, and a reply on its way.

    The victim has announced its reply and sent none of its objects.
    """

    attacker: Party
    victim: Party
    run: int
    other_run: int
    own: Message
    theirs: Message
    reply: Message


ATTACKS = {
    "a reply in the name of the victim": (
        "PushMessages",
        lambda s: push(s.attacker, reply_to(s.theirs, "forged", s.victim.id)),
    ),
    "a reply to the victim's message": (
        "PushMessages",
        lambda s: push(s.attacker, reply_to(s.theirs, "forged", s.attacker.id)),
    ),
    "a reply of the victim's to the attacker's message": (
        "PushMessages",
        lambda s: push(s.attacker, reply_to(s.own, "forged", s.victim.id)),
    ),
    "a second reply behind an honest one": (
        "PushMessages",
        lambda s: push(
            s.attacker, reply_to(s.own, "mine"), reply_to(s.theirs, "forged", s.victim.id)
        ),
    ),
    "a reply with the objects of the victim's": (
        "PushMessages",
        lambda s: push(s.attacker, reply_to(s.own, "mine"), tree=s.reply),
    ),
    "a reply in another run": (
        "PushMessages",
        lambda s: push(s.attacker, in_run(s.other_run, reply_to(s.own, "mine"))),
    ),
    "a reply with the id of the victim's": (
        "PushMessages",
        lambda s: push(s.attacker, named_as(s.reply, reply_to(s.own, "mine")), tree=s.reply),
    ),
    "a reply with the id of the victim's message": (
        "PushMessages",
        lambda s: push(s.attacker, named_as(s.theirs, reply_to(s.own, "mine")), tree=s.theirs),
    ),
    "a reply to no message": (
        "PushMessages",
        lambda s: push(s.attacker, reply_to(s.reply, "forged", s.attacker.id)),
    ),
    "a push as the victim": (
        "PushMessages",
        lambda s: push(s.victim, reply_to(s.theirs, "forged")),
    ),
    "an object of the victim's reply": ("PushObject", lambda s: objects(s.attacker, s.reply)[0]),
    "an object of the victim's message": ("PushObject", lambda s: objects(s.attacker, s.theirs)[0]),
    "the victim's message": (
        "PullObject",
        lambda s: named(PullObjectRequest, s.attacker.node, s.run, s.theirs.object_id),
    ),
    "the victim's model": (
        "PullObject",
        lambda s: named(
            PullObjectRequest, s.attacker.node, s.run, s.theirs.content["arrays"].object_id
        ),
    ),
    "the victim's reply": (
        "PullObject",
        lambda s: named(PullObjectRequest, s.attacker.node, s.run, s.reply.content.object_id),
    ),
    "the victim's message is dropped": (
        "ConfirmMessageReceived",
        lambda s: named(ConfirmMessageReceivedRequest, s.attacker.node, s.run, s.theirs.object_id),
    ),
    "the victim's reply is dropped": (
        "ConfirmMessageReceived",
        lambda s: named(ConfirmMessageReceivedRequest, s.attacker.node, s.run, s.reply.object_id),
    ),
    "a poll as the victim": ("PullMessages", lambda s: PullMessagesRequest(node=s.victim.node)),
    "a heartbeat of the victim": (
        "SendNodeHeartbeat",
        lambda s: SendNodeHeartbeatRequest(node=s.victim.node, heartbeat_interval=30),
    ),
    # The SuperLink then gives up the message that the victim has fetched.
    "the victim starts": (
        "ActivateNode",
        lambda s: ActivateNodeRequest(public_key=s.victim.public_key, heartbeat_interval=30),
    ),
    "the victim ends": ("DeactivateNode", lambda s: DeactivateNodeRequest(node_id=s.victim.id)),
    "the victim is no longer registered": (
        "UnregisterNode",
        lambda s: UnregisterNodeFleetRequest(node_id=s.victim.id),
    ),
    "a key registers itself": (
        "RegisterNode",
        lambda s: RegisterNodeFleetRequest(public_key=b"another"),
    ),
    "a run as the victim": ("GetRun", lambda s: GetRunRequest(node=s.victim.node, run_id=s.run)),
    "a bundle as the victim": (
        "GetFab",
        lambda s: GetFabRequest(node=s.victim.node, run_id=s.run, hash_str="of a bundle"),
    ),
}
"""Call of the Fleet API and its request, by what the attacker tries."""
UNAUTHENTICATED = dict.fromkeys(
    (
        *("a push as the victim", "PullMessages", "SendNodeHeartbeat", "DeactivateNode"),
        *("UnregisterNode", "GetRun", "GetFab"),
    ),
    "UNAUTHENTICATED",
)
CODES = UNAUTHENTICATED | {"RegisterNode": "FAILED_PRECONDITION"}
"""How attacks and calls are refused, unless by PERMISSION_DENIED."""


@contextmanager
def scene(superlink):
    own, theirs = (superlink.send(place, number=place) for place in range(2))
    with superlink.party(0) as attacker, superlink.party(1) as victim:
        for each, message in ((attacker, own), (victim, theirs)):
            found = each.stub.PullMessages(PullMessagesRequest(node=each.node))
            assert [m.metadata.message_id for m in found.messages_list] == [message.object_id]
        reply = reply_to(theirs, "honest")
        victim.stub.PushMessages(push(victim, reply))
        yield Scene(attacker, victim, superlink.run, superlink.start_run(), own, theirs, reply)


def finish(superlink, scene):
    """The victim receives its message and sends its reply, as if there were no attacker."""
    victim = scene.victim
    for name, part in get_all_nested_objects(scene.theirs).items():
        request = named(PullObjectRequest, victim.node, scene.run, name)
        assert victim.stub.PullObject(request).object_content == part.deflate()
    victim.stub.ConfirmMessageReceived(
        named(ConfirmMessageReceivedRequest, victim.node, scene.run, scene.theirs.object_id)
    )
    for request in objects(victim, scene.reply):
        assert victim.stub.PushObject(request).stored
    (reply,) = superlink.state.get_message_res({scene.theirs.object_id})
    assert reply.metadata.src_node_id == victim.id
    assert reply.metadata.message_id == scene.reply.object_id
    for name, part in get_all_nested_objects(scene.reply).items():
        assert superlink.store.get(name) == part.deflate()


def refused(call, *arguments):
    with pytest.raises(grpc.RpcError) as error:
        call(*arguments)
    return error.value.code().name


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_node_cannot_call_for_another(superlink, attack):
    name, request = ATTACKS[attack]
    with scene(superlink) as found:
        code = refused(getattr(found.attacker.stub, name), request(found))
        assert code == CODES.get(attack, CODES.get(name, "PERMISSION_DENIED"))
        finish(superlink, found)


@pytest.mark.parametrize("attack", [a for a, (name, *_) in ATTACKS.items() if name in TOGETHER])
def test_nor_in_a_batch_behind_a_call_of_its_own(superlink, attack):
    _, request = ATTACKS[attack]
    with scene(superlink) as found:
        attacker = found.attacker
        first = named(PullObjectRequest, attacker.node, found.run, found.own.object_id)
        batch = attacker.together.make_all, attacker.node, found.run, [first, request(found)]
        assert refused(*batch) in ("PERMISSION_DENIED", "INVALID_ARGUMENT")
        finish(superlink, found)


def test_every_call_of_the_fleet_api_is_attacked_here():
    service = fleet_pb2.DESCRIPTOR.services_by_name["Fleet"]
    assert {method.name for method in service.methods} == {name for name, *_ in ATTACKS.values()}


@pytest.mark.parametrize("superlink", ["SQLite"], indirect=True)
def test_a_node_goes_on_with_its_message_after_the_superlink_has_restarted(superlink):
    with scene(superlink) as found:
        pass
    superlink.stop()
    superlink.start()
    with superlink.party(0) as attacker, superlink.party(1) as victim:
        reply = reply_to(found.own, "mine")
        for name in get_all_nested_objects(found.own):
            request = named(PullObjectRequest, attacker.node, found.run, name)
            assert attacker.stub.PullObject(request).object_available
        theirs = objects(attacker, found.reply)[0]
        assert refused(attacker.stub.PushObject, theirs) == "PERMISSION_DENIED"
        attacker.stub.PushMessages(announce_also(attacker, reply, get_object_tree(found.reply)))
        for request in objects(attacker, reply):
            assert attacker.stub.PushObject(request).stored
        for request in objects(victim, found.reply):  # which it had announced before
            assert victim.stub.PushObject(request).stored
        replies = superlink.state.get_message_res({found.own.object_id, found.theirs.object_id})
    assert {each.metadata.src_node_id for each in replies} == {attacker.id, victim.id}


def test_replies_that_share_objects_are_stored_whoever_sends_these_first(superlink):
    own, theirs = (superlink.send(place, number=place) for place in range(2))
    with superlink.party(0) as one, superlink.party(1) as other:
        for each, message in ((one, own), (other, theirs)):
            each.stub.PullMessages(PullMessagesRequest(node=each.node))
            each.stub.PushMessages(push(each, reply_to(message, "the same")))
        for each, message in ((one, own), (other, theirs), (one, own)):
            for request in objects(each, reply_to(message, "the same"))[:-1]:
                assert each.stub.PushObject(request).stored


def is_whole(superlink, message):
    return superlink.store.get_object_tree(message.object_id) == get_object_tree(message) and all(
        superlink.store.get(name) == part.deflate()
        for name, part in get_all_nested_objects(message).items()
    )


@contextmanager
def parties(superlink):
    """An attacker with a message that it has fetched, and a victim without."""
    with superlink.party(0) as attacker, superlink.party(1) as victim:
        message = superlink.send(0, number=0)
        fetch(attacker)
        yield attacker, victim, message


@pytest.mark.parametrize("when", ["before the victim's", "between its announcement and content"])
def test_an_object_announced_with_false_parts_spoils_no_message_of_others(superlink, when):
    """The attacker knows the server's next message and the victim's reply before they come."""
    theirs = superlink.message(1, number=1)
    reply = reply_to(theirs, "honest")
    foreign = [theirs.content, theirs.content["arrays"], reply.content, reply.content["answer"]]
    with parties(superlink) as (attacker, victim, message):
        lie = announce_also(attacker, reply_to(message, "mine"), *false(*foreign))
        if when.startswith("before"):
            attacker.stub.PushMessages(lie)
        superlink.store.preregister(superlink.run, get_object_tree(theirs))
        assert superlink.state.store_message_ins(theirs)
        assert fetch(victim) == theirs.object_id
        missing = victim.stub.PushMessages(push(victim, reply)).objects_to_push
        assert set(missing) == get_all_nested_objects(reply).keys()
        if not when.startswith("before"):
            attacker.stub.PushMessages(lie)
        for name, part in get_all_nested_objects(theirs).items():
            superlink.store.put(name, part.deflate())
        for request in objects(victim, reply):
            assert victim.stub.PushObject(request).stored
        assert is_whole(superlink, theirs)
        assert is_whole(superlink, reply)


def test_a_message_that_another_claims_as_its_part_outlives_that_one(superlink):
    """It was deleted with the other message, or with the run of the other."""
    with parties(superlink) as (attacker, _, message):
        theirs = superlink.send(1, number=1)
        reply = reply_to(message, "mine")
        attacker.stub.PushMessages(announce_also(attacker, reply, get_object_tree(theirs)))
        superlink.store.delete(reply.object_id)
        assert is_whole(superlink, theirs)


def test_a_run_that_claims_another_runs_message_does_not_delete_it_when_it_ends(superlink):
    theirs = superlink.send(1, number=1)
    tree = ObjectTree(object_id="e" * 64, children=[get_object_tree(theirs)])
    other_run = superlink.start_run()
    superlink.store.preregister(other_run, tree)
    superlink.store.delete_objects_in_run(other_run)
    assert is_whole(superlink, theirs)


def test_of_a_reply_that_is_not_taken_nothing_is_registered(superlink):
    """A second reply to a message, and one to a message that has expired."""
    with parties(superlink) as (attacker, _, message):
        first, second = (reply_to(message, words) for words in ("first", "second"))
        attacker.stub.PushMessages(push(attacker, first))
        for reply in (second, reply_to(superlink.expired(0), "late")):
            before = len(superlink.store)
            assert not attacker.stub.PushMessages(push(attacker, reply)).objects_to_push
            assert len(superlink.store) == before
        for request in objects(attacker, first):
            assert attacker.stub.PushObject(request).stored
        assert is_whole(superlink, first)


def test_a_reply_announces_a_bounded_number_of_objects(superlink, monkeypatch):
    monkeypatch.setattr(callers, "MAX_OBJECTS", 10)
    with parties(superlink) as (attacker, _, message):
        reply = reply_to(message, "mine")
        parts = len(get_all_nested_objects(reply))
        more = [ObjectTree(object_id=f"{number:064x}") for number in range(11 - parts)]
        before = len(superlink.store)
        too_much = announce_also(attacker, reply, *more)
        assert refused(attacker.stub.PushMessages, too_much) == "PERMISSION_DENIED"
        assert len(superlink.store) == before
        attacker.stub.PushMessages(announce_also(attacker, reply, *more[1:]))
        assert len(superlink.store) == before + 10


def test_what_large_models_announce_is_within_the_bound():
    """10,000 tensors, of 400 GB in all: an array each, and its chunks of 5 MiB."""
    chunks = 10_000 + 400 * 10**9 // FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
    assert 10_000 + chunks + 10 < callers.MAX_OBJECTS


def test_what_is_cached_of_nodes_that_come_and_go_is_bounded(superlink, monkeypatch):
    monkeypatch.setattr(callers, "MAX_CACHED", 20)
    tree = get_object_tree(superlink.message(0, number=0))
    for node in range(100):
        superlink.servicer._cache(node, [tree])
    cached = superlink.servicer._fetched
    assert sum(len(each.objects) for each in cached.values()) == superlink.servicer._cached <= 20
    assert 99 in cached
    with scene(superlink) as found:
        superlink.servicer._cache(7, [tree] * 3)
        finish(superlink, found)


def test_a_short_tree_of_objects_does_not_become_an_endless_one(superlink):
    """Each level was there twice, once without its parts: 40 levels are 2^40 objects."""
    message = superlink.send(0, 1)
    with superlink.party(0) as attacker:
        attacker.stub.PullMessages(PullMessagesRequest(node=attacker.node))
        reply = reply_to(message, "large")
        tree = ObjectTree(object_id=f"{0:064x}")
        for level in range(1, 15):
            again = ObjectTree(object_id=tree.object_id)
            beside = ObjectTree(object_id=f"{level:063x}f", children=[again])
            tree = ObjectTree(object_id=f"{level:063x}e", children=[tree, beside])
        tree.object_id = reply.object_id
        request = push(attacker, reply)
        request.message_object_trees[0].CopyFrom(tree)
        with pytest.raises(grpc.RpcError):
            attacker.stub.PushMessages(request)
    with pytest.raises(NoObjectInStoreError):
        superlink.store.get_object_tree(reply.object_id)
