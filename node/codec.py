"""The node's end of coded links: models are decoded before anything here judges or trains them.

It stands beside the guard, outside any sandbox, so that apps need not know of it. What it keeps
lies in the node's store for the run, where the app may write: it is read within bounds, and what
cannot be read is not there. Nothing is kept of a message that the guard refuses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message
from flwr.common import log
from numpy.typing import NDArray
from safetensors.numpy import load, save

from flwr_distill.links.folder import LinkFolder
from flwr_distill.protocol.arrays import Arrays, as_arrays, num_bytes
from flwr_distill.protocol.codecs import CODECS, CodecError
from flwr_distill.protocol.coded import CODEC, Coding, coded, decoded, version_of
from flwr_distill.protocol.meeting import DESCRIBE, one_line, own_version
from flwr_distill.protocol.messages import ARRAYS, CONFIG
from flwr_distill.protocol.replies import UNKNOWN
from flwr_distill.storage.store import NodeStore

LEFT_OUT = "left-out-"
"""Begins the names of blobs of what a codec has left out; the message type follows."""
MAX_BYTES = 1 << 32
"""Of a message's model."""
HEADER = 1 << 20
"""Bytes of a blob beside its arrays."""


@dataclass
class _Received:
    """A message that waits for its reply."""

    message_type: str
    store: NodeStore
    coding: Coding | None = None
    model: Arrays = field(default_factory=dict)
    most: int = 0
    """Bytes of a blob with such a model."""
    left_out: Mapping[str, NDArray[Any]] = field(default_factory=dict)


class NodeCodec:
    """Decodes the model in a message to a node, and encodes the one in its reply.

    Parameters
    ----------
    state_dir : str or Path
        The node's.
    durable : bool (default: True)
        Whether what is kept must outlive a loss of power.
    loopback : bool (default: False)
        Whether the node calls its SuperLink on loopback, which the description says.
    """

    def __init__(self, state_dir: Any, *, durable: bool = True, loopback: bool = False) -> None:
        self._state_dir = state_dir
        self._durable = durable
        self._loopback = loopback
        self._received: _Received | None = None

    def receive(self, message: Message) -> bool:
        """Decode the model of a message in place, and remember it for the reply.

        Returns whether it was coded. Raises CodecError if it cannot be decoded, and SettingsError
        if what it says of its coding is malformed.
        """
        about = message.metadata
        store = NodeStore.open(
            self._state_dir, about.run_id, about.dst_node_id, durable=self._durable
        )
        self._received = received = _Received(about.message_type, store)
        record = message.content.config_records.get(CODEC)
        if record is None:
            return False
        del message.content[CODEC]
        coding = Coding.checked(record, CODEC)
        coded_model = message.content.array_records.get(ARRAYS, ArrayRecord())
        received.most = sum(map(_num_bytes, coded_model.values())) + HEADER
        if received.most > MAX_BYTES:
            raise CodecError(f"its model has over {MAX_BYTES:,} bytes")
        start = _kept_model(store, coding.base, received.most) if coding.base else None
        model = decoded(coded_model, start)
        received.model = as_arrays(model)
        if version_of(received.model) != coding.version:
            raise CodecError("its model is not the one that the server coded")
        received.coding = coding
        message.content[ARRAYS] = model
        return True

    def encode(self, reply: Message) -> tuple[ArrayRecord | None, int]:
        """The coded model in place of a reply's, if it was asked for, and the bytes saved."""
        received = self._received
        if received is None or received.coding is None or not reply.has_content():
            return None, 0
        model, coding = reply.content.array_records.get(ARRAYS), received.coding
        if model is None or coding.up == "float32":
            return None, 0
        before = _left_out(received, coding.received)
        rng = np.random.default_rng(coding.seed)
        try:
            record, left_out = coded(model, coding.up, rng, received.model, before)
            saved = num_bytes(model) - num_bytes(record)
        except Exception as error:  # whatever a hostile app's arrays make them raise
            log(WARNING, "The app's model is sent as it is: %s", one_line(error))
            return None, 0
        received.left_out = left_out
        return record, saved

    def finish(self, reply: Message, coded_model: ArrayRecord | None, header: Message) -> Message:
        """The reply that leaves, with its model coded; what is needed later is kept first.

        A description says that there are codecs, which version has them, and whether the link is
        loopback. `header` is the message that is answered.
        """
        received, self._received = self._received, None
        if received is None or not reply.has_content():
            return reply
        if coded_model is not None and ARRAYS in reply.content.array_records:
            reply.content[ARRAYS] = coded_model
        if received.message_type == DESCRIBE:
            config = reply.content.config_records.get(CONFIG, ConfigRecord())
            reply.content[CONFIG] = ConfigRecord(
                {
                    **config,
                    "codecs": list(CODECS),
                    "version": own_version(),
                    "loopback": self._loopback,
                }
            )
        try:
            _keep(received)
        except OSError as error:
            reason = f"the node cannot keep what its codec needs: {error.strerror or error}"
            return Message(Error(UNKNOWN, reason), reply_to=header)
        return reply


def _num_bytes(array: Array) -> int:
    """The most bytes of an array once it is decoded, by its claimed shape."""
    return 8 * abs(math.prod(array.shape))


def _keep(received: _Received) -> None:
    """Keep a model, those that the server builds on until it hears of this one, and what is left.

    OSError if the disk is full, or the app has put something in the way.
    """
    if (coding := received.coding) is None:
        return
    models = LinkFolder(received.store).models
    names = set(models.names())
    for name in names - {coding.version, *coding.keep}:
        models.remove(name)
    if coding.version not in names:
        whole = {name: np.ascontiguousarray(array) for name, array in received.model.items()}
        models.write(coding.version, save(whole))
    if received.left_out:
        blob = f"{LEFT_OUT}{received.message_type}"
        received.store.at(coding.round).write(blob, save(dict(received.left_out)))


def _kept_model(store: NodeStore, version: str, most: int) -> Arrays:
    model = _read(LinkFolder(store).models, version, most)
    if model is None or version_of(model) != version:
        raise CodecError("this node no longer has the model that the message builds on")
    return model


def _left_out(received: _Received, counted: int) -> Arrays | None:
    """What was left out up to the last reply that counted; of lost ones nothing was sent."""
    blob = f"{LEFT_OUT}{received.message_type}"
    with suppress(OSError):
        for file in received.store.names():
            stem, _, number = file.rpartition("@")
            if stem == blob and number.isdecimal() and int(number) > counted:
                received.store.remove(file)
    return _read(received.store, blob, received.most)


def _read(store: NodeStore, name: str, most: int) -> dict[str, NDArray[Any]] | None:
    """Arrays in a blob; None if there is none, or an app has put something else there."""
    try:
        content = store.read(name, most)
        return None if content is None else load(content)
    except Exception:  # whatever the app's file makes them raise
        return None
