"""The node's end of coded links: models are decoded before anything here judges or trains them.

It stands beside the guard, outside any sandbox, so that apps need not know of it. What it keeps is
in the node's store for the run, where a resumed run finds it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from flwr_distill.protocol.arrays import Arrays, as_arrays, num_bytes
from flwr_distill.protocol.codecs import CODECS, CodecError
from flwr_distill.protocol.coded import CODEC, Coding, coded, decoded, version_of
from flwr_distill.protocol.meeting import DESCRIBE
from flwr_distill.protocol.messages import ARRAYS, CONFIG
from flwr_distill.storage.store import NodeStore

MODEL = "received-"
"""Begins the names of blobs of models that the node has got; their hash follows."""
REST = "left-out-"
"""Begins the names of blobs of what a codec has left out; the message type follows."""
MAX_BYTES = 1 << 32
"""Of a message's model, and of a blob: apps may write into the store."""


@dataclass(frozen=True)
class _Received:
    """A message that waits for its reply."""

    message_type: str
    store: NodeStore
    coding: Coding
    model: Arrays


class NodeCodec:
    """Decodes the model in a message to a node, and encodes the one in its reply."""

    def __init__(self, state_dir: Any, *, durable: bool = True) -> None:
        self._state_dir = state_dir
        self._durable = durable
        self._received: _Received | None = None

    def receive(self, message: Message) -> bool:
        """Decode the model of a message in place, and remember it for the reply.

        Returns whether it was coded. Raises CodecError if it cannot be decoded.
        """
        about = message.metadata
        store = NodeStore.open(
            self._state_dir, about.run_id, about.dst_node_id, durable=self._durable
        )
        self._received = _Received(about.message_type, store, Coding(), {})
        record = message.content.config_records.get(CODEC)
        if record is None:
            return False
        del message.content[CODEC]
        coding = Coding.checked(record, CODEC)
        coded_model = message.content.array_records.get(ARRAYS, ArrayRecord())
        if sum(map(_num_bytes, coded_model.values())) > MAX_BYTES:
            raise CodecError(f"its model has over {MAX_BYTES:,} bytes")
        model = decoded(coded_model, _kept_model(store, coding.base) if coding.base else None)
        arrays = as_arrays(model)
        if version_of(arrays) != coding.version:
            raise CodecError("its model is not the one that the server coded")
        _keep_model(store, coding, arrays)
        message.content[ARRAYS] = model
        self._received = _Received(about.message_type, store, coding, arrays)
        return True

    def encode(self, reply: Message) -> tuple[ArrayRecord | None, int]:
        """The coded model in place of a reply's, if it was asked for, and the bytes saved."""
        received = self._received
        if received is None or received.coding.up == "float32" or not reply.has_content():
            return None, 0
        model, coding = reply.content.array_records.get(ARRAYS), received.coding
        if model is None:
            return None, 0
        name = f"{REST}{received.message_type}"
        rest = _left_out(received.store, name, coding.received)
        try:
            rng = np.random.default_rng(coding.seed)
            record, left = coded(model, coding.up, rng, received.model, rest)
        except ValueError:  # unreadable arrays: the guard or the server rejects them
            return None, 0
        if left:
            received.store.at(coding.round).write(name, save(left))
        return record, num_bytes(model) - num_bytes(record)

    def finish(self, reply: Message, coded_model: ArrayRecord | None) -> Message:
        """The reply that leaves, with its model coded; a description says that there are codecs."""
        received, self._received = self._received, None
        if received is None or not reply.has_content():
            return reply
        if coded_model is not None and ARRAYS in reply.content:
            reply.content[ARRAYS] = coded_model
        if received.message_type == DESCRIBE:
            if CONFIG not in reply.content:
                reply.content[CONFIG] = ConfigRecord()
            reply.content.config_records[CONFIG]["codecs"] = list(CODECS)
        return reply


def _num_bytes(array: Array) -> int:
    """Bytes of an array once it is decoded, by its claimed shape; coded ones are float32."""
    return 4 * abs(math.prod(array.shape))


def _kept_model(store: NodeStore, version: str) -> Arrays:
    model = _read(store, MODEL + version)
    if model is None or version_of(model) != version:
        raise CodecError("this node no longer has the model that the message builds on")
    return model


def _keep_model(store: NodeStore, coding: Coding, arrays: Arrays) -> None:
    """Keep a model, and those that the server builds on until it hears of this one."""
    kept = {MODEL + name for name in (coding.version, *coding.keep)}
    names = {name for name in store.names() if name.startswith(MODEL)}
    for name in names - kept:
        store.remove(name)
    if MODEL + coding.version not in names:
        whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        store.write(MODEL + coding.version, save(whole))


def _left_out(store: NodeStore, name: str, received: int) -> Arrays | None:
    """What was left out up to the last reply that counted; of lost ones nothing was sent."""
    for file in store.names():
        stem, _, number = file.rpartition("@")
        if stem == name and number.isdigit() and int(number) > received:
            store.remove(file)
    return _read(store, name)


def _read(store: NodeStore, name: str) -> dict[str, NDArray[Any]] | None:
    """Arrays in a blob; None if there is none, or an app has put something else there."""
    content = store.read(name, MAX_BYTES)
    try:
        return None if content is None else load(content)
    except SafetensorError:
        return None
