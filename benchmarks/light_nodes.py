"""Light nodes: many in one process, for `benchmarks.fleet`.

Each is the loop of Flower's SuperNode, with its own connection, key and heartbeats. In place of an
app it answers each message at once, with the arrays that came, moved a little.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, cast

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.object_store import ObjectStore, ObjectStoreFactory
from flwr.supernode import start_client_internal as loop
from flwr.supernode.nodestate import NodeState, NodeStateFactory
from grpc import _channel

from flwr_distill.flower.lines import module_of_line
from flwr_distill.flower.overrides import (
    WholeMessages,
    patch_loop,
    patch_nonce_cleanup,
)
from flwr_distill.flower.pulls import patch_pull_backoff
from flwr_distill.flower.steps import ReadingPull
from flwr_distill.node.pace import Pace
from flwr_distill.node.settings import NodeSettings
from flwr_distill.node.stock import FLEET_OVER_HTTP, installed_line, is_another

STOCK_PAUSE = 3.0
STOCK_REPLY_POLL = 0.5
"""Flower's pauses between polls for messages, and for its app's reply, in seconds."""
BETWEEN_STARTS = 0.05
_TRANSPORT: Any = {"transport": "grpc-rere"} if installed_line() < FLEET_OVER_HTTP else {}
REGISTERED = not is_another()
"""Whether nodes are registered; Flower's command, elsewhere, takes seconds for each."""
_OWN = threading.local()
"""`pace` of a node's thread."""


@dataclass(frozen=True)
class Door:
    """Where nodes sign on, and with which keys (PEM)."""

    address: str
    root_certificates: bytes
    keys: Sequence[bytes]


class LightNode:
    """A node.

    Attributes
    ----------
    polls, messages, pulls : int
        How often it asked for a message, got one, and asked for an object of one.
    answered : float
        When its last poll was answered, in ``time.monotonic()`` seconds.
    """

    def __init__(self, door: Door, key: bytes, pace: Pace | None) -> None:
        self._door = door
        self._key = cast(ec.EllipticCurvePrivateKey, load_pem_private_key(key, None))
        self._pace = pace
        self.polls = self.messages = self.pulls = 0
        self.answered = 0.0
        self.thread = threading.Thread(target=self._work, daemon=True)

    def _work(self) -> None:
        _OWN.pace = self._pace
        try:
            self._live()
        except Exception as error:
            print(f"a node ended: {error!r}", flush=True)

    def _live(self) -> None:
        objects = ObjectStoreFactory()
        state, store = NodeStateFactory(objects).state(), objects.store()
        with loop._init_connection(
            **_TRANSPORT,
            server_address=self._door.address,
            insecure=False,
            root_certificates=self._door.root_certificates,
            authentication_keys=(self._key, self._key.public_key()) if REGISTERED else None,
        ) as (node_id, receive, send, get_run, get_fab, pull_object, push_object, confirm):
            state.set_node_id(node_id)

            def pull_counted(run_id: int, object_id: str) -> bytes:
                self.pulls += 1
                return pull_object(run_id, object_id)

            while True:
                reading = ReadingPull(pull_counted)
                run_id = loop._pull_and_store_message(
                    state=state,
                    object_store=store,
                    node_config={},
                    receive=receive,
                    get_run=get_run,
                    get_fab=get_fab,
                    pull_object=reading,
                    confirm_message_received=confirm,
                    trusted_entities=None,
                )
                self.polls, self.answered = self.polls + 1, time.monotonic()
                if run_id is None:
                    time.sleep(self._pace.draw() if self._pace else STOCK_PAUSE)
                    continue
                self.messages += 1
                answer(state, store)
                if self._pace:
                    self._pace.space(reading.spacing)
                    self._pace.worked()
                else:
                    time.sleep(STOCK_REPLY_POLL)
                loop._push_messages(
                    state=state, object_store=store, send=send, push_object=push_object
                )


def answer(state: NodeState, store: ObjectStore) -> None:
    """Answer the message that is here, in place of an app."""
    waiting = getattr(state, "get_messages_legacy", state.get_messages)
    for header in waiting(is_reply=False):
        name = header.metadata.message_id
        parts = [part.object_id for part in iterate_object_tree(store.get_object_tree(name))]
        contents = {part: store.get(part) for part in parts}
        message = cast(Message, inflate_object_from_contents(name, cast(Any, contents)))
        message.metadata.__dict__["_message_id"] = name
        moved = ArrayRecord(
            {
                key: Array(array.numpy() + np.float32(random.random()))
                for key, array in message.content.array_records["arrays"].items()
            }
        )
        content = RecordDict({"arrays": moved, "metrics": MetricRecord({"num-examples": 1})})
        store.delete(name)
        state.record_message_processing_start(name)
        state.record_message_processing_end(name)
        loop._insert_message(Message(content, reply_to=message), state, store)


@dataclass(frozen=True)
class Told:
    """Sums of nodes' counts, and how many were answered since some time, and live."""

    polls: int
    messages: int
    pulls: int
    answered: int
    alive: int


def serve(door: Door, ours: bool, questions: Connection) -> None:
    """Run nodes, at our pace or Flower's, until this process is ended.

    For each time in ``time.monotonic()`` seconds that comes in, they tell what there was since.
    """
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    # Flower has each channel's state logged, by a thread that wakes five times a second. Those of a
    # thousand nodes in one place would take the processor that the SuperLink is measured on.
    _channel.Channel.subscribe = lambda *_, **__: None
    settings = NodeSettings.model_fields
    if ours:
        patch_pull_backoff()
        patch_loop(WholeMessages())
        patch_nonce_cleanup()
        if (connection := module_of_line("node", "connection")) is not None:
            connection.patch_connection(lambda: _OWN.pace, lambda reason: None)
    nodes = []
    for key in door.keys:
        pace = Pace(
            busy=settings["poll_busy"].default,
            idle=settings["poll_idle"].default,
            generator=random.Random(),
        )
        nodes.append(LightNode(door, key, pace if ours else None))
    for node in nodes:
        node.thread.start()
        time.sleep(BETWEEN_STARTS)
    while True:
        since = questions.recv()
        questions.send(
            Told(
                polls=sum(node.polls for node in nodes),
                messages=sum(node.messages for node in nodes),
                pulls=sum(node.pulls for node in nodes),
                answered=sum(node.answered > since for node in nodes),
                alive=sum(node.thread.is_alive() for node in nodes),
            )
        )
