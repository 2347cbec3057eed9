"""The node's end of coded links: models are decoded before anything here judges or trains them.

It stands beside the guard, outside any sandbox, so that apps need not know of it. What it keeps
lies in the node's store for the run, where the app may write: it is read within bounds, and what
cannot be read is not there. Nothing is kept of a message that the guard refuses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
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
from flwr_distill.protocol.arrays import Arrays, as_arrays
from flwr_distill.protocol.codecs import CODECS, EXACT, CodecError
from flwr_distill.protocol.coded import BESIDE, CODEC, Coding, coded, decoded, version_of
from flwr_distill.protocol.meeting import DESCRIBE, one_line, own_version
from flwr_distill.protocol.messages import ARRAYS, CONFIG
from flwr_distill.protocol.parcels import ABILITY
from flwr_distill.protocol.replies import UNKNOWN
from flwr_distill.storage.store import NodeStore

OWN_CODECS = (*CODECS, BESIDE, ABILITY)
"""What a node says that it codes."""
LEFT_OUT = "left-out-"
"""Begins the names of blobs of what a codec has left out; the message type follows, and the record
where that is not the model."""
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
    left_out: dict[str, Mapping[str, NDArray[Any]]] = field(default_factory=dict)
    """By the name of the record."""

    def blob(self, name: str) -> str:
        """Name of the blob of what was left out of a record."""
        return f"{LEFT_OUT}{self.message_type}" + ("" if name == ARRAYS else f"-{name}")


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
    shared : MutableMapping[str, ArrayRecord], optional (default: None)
        Records of arrays by version that other nodes in this process have: equal ones are in memory
        once.
    """

    def __init__(
        self,
        state_dir: Any,
        *,
        durable: bool = True,
        loopback: bool = False,
        shared: MutableMapping[str, ArrayRecord] | None = None,
    ) -> None:
        self._state_dir = state_dir
        self._durable = durable
        self._loopback = loopback
        self._shared = shared
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
        if not coding.version and not message.content.array_records:
            received.coding = coding
            return True
        coded_model = message.content.array_records.get(ARRAYS, ArrayRecord())
        received.most = sum(map(_num_bytes, coded_model.values())) + HEADER
        others = {n: r for n, r in message.content.array_records.items() if n != ARRAYS}
        of_others = sum(
            _num_bytes(array) for record in others.values() for array in record.values()
        )
        if received.most + of_others > MAX_BYTES:
            raise CodecError(f"its models have over {MAX_BYTES:,} bytes")
        start = _kept_model(store, coding.base, received.most) if coding.base else None
        model = decoded(coded_model, start)
        received.model = as_arrays(model)
        if version_of(received.model) != coding.version:
            raise CodecError("its model is not the one that the server coded")
        if self._shared is not None:
            model = self._shared.setdefault(coding.version, model)
            received.model = as_arrays(model)
        received.coding = coding
        message.content[ARRAYS] = model
        for name, other in others.items():
            plain = decoded(other)
            if self._shared is not None:
                plain = self._shared.setdefault(version_of(as_arrays(plain)), plain)
            message.content[name] = plain
        return True

    def forget(self) -> None:
        """Forget a message whose task ended before a reply was finished."""
        self._received = None

    def encode(self, reply: Message) -> dict[str, ArrayRecord]:
        """Coded records in place of a reply's, as far as they were asked for."""
        received = self._received
        if received is None or received.coding is None or not reply.has_content():
            return {}
        coding, records = received.coding, dict[str, ArrayRecord]()
        rng = np.random.default_rng(coding.seed)
        for name in (ARRAYS, *coding.beside) if coding.up != "float32" else ():
            if (plain := reply.content.array_records.get(name)) is None:
                continue
            before = _left_out(received, name)
            start = received.model if name == ARRAYS else None
            if name != ARRAYS:  # what it adds up to counts, and the rests with it
                before = before or {}
            try:
                if sum(_num_bytes(array) for array in plain.values()) > MAX_BYTES:
                    raise CodecError(f"arrays of over {MAX_BYTES:,} bytes")
                if coding.version:
                    record, left_out = coded(plain, coding.up, rng, start, before)
                else:
                    record, left_out = _coded_alone(received.store, coding, plain, rng), {}
            except Exception as error:  # whatever a hostile app's arrays make them raise
                log(WARNING, "The app's %s are sent as they are: %s", name, one_line(error))
                continue
            records[name], received.left_out[name] = record, left_out
        return records

    def finish(self, reply: Message, records: dict[str, ArrayRecord], header: Message) -> Message:
        """The reply that leaves, with its models coded; what is needed later is kept first.

        A description says that there are codecs, which version has them, and whether the link is
        loopback. `header` is the message that is answered.
        """
        received, self._received = self._received, None
        if received is None or not reply.has_content():
            return reply
        for name in records.keys() & reply.content.array_records.keys():
            reply.content[name] = records[name]
        if received.message_type == DESCRIBE:
            config = reply.content.config_records.get(CONFIG, ConfigRecord())
            reply.content[CONFIG] = ConfigRecord(
                {
                    **config,
                    "codecs": list(OWN_CODECS),
                    "version": own_version(),
                    "loopback": self._loopback,
                }
            )
        try:
            _keep(received)
        except Exception as error:  # a full disk, the app's files, or arrays that no file holds
            reason = f"the node cannot keep what its codec needs: {one_line(error)}"
            return Message(Error(UNKNOWN, reason), reply_to=header)
        return reply


def _num_bytes(array: Array) -> int:
    """The most bytes of an array once it is decoded, by its claimed shape."""
    return 8 * abs(math.prod(array.shape))


def _keep(received: _Received) -> None:
    """Keep a model, those that the server builds on until it hears of this one, and what is left.

    OSError if the disk is full, or the app has put something in the way; any error if a hostile
    server's arrays cannot be in a file.
    """
    if (coding := received.coding) is None or not coding.version:
        return
    models = LinkFolder(received.store).models
    for name in set(models.names()) - {coding.version, *coding.keep}:
        models.remove(name)
    if coding.version != coding.base:  # else it was read from there, and is whole
        models.write(coding.version, save(dict(received.model)))
    for name, left_out in received.left_out.items():
        if left_out:
            received.store.at(coding.round).write(received.blob(name), save(dict(left_out)))


def _coded_alone(
    store: NodeStore, coding: Coding, model: ArrayRecord, rng: np.random.Generator
) -> ArrayRecord:
    """An answer to a message without a model: the difference to the one that the server says.

    What is unlike that is packed without loss.
    """
    most, base = sum(map(_num_bytes, model.values())) + HEADER, None
    if coding.base and most <= MAX_BYTES:
        with suppress(CodecError):
            base = _kept_model(store, coding.base, most)
    if base is None or base.keys() != model.keys():
        return coded(model, EXACT, rng)[0]
    return coded(model, coding.up, rng, base)[0]


def _kept_model(store: NodeStore, version: str, most: int) -> Arrays:
    model = _read(LinkFolder(store).models, version, most)
    if model is None or version_of(model) != version:
        raise CodecError("this node no longer has the model that the message builds on")
    return model


def _left_out(received: _Received, name: str) -> Arrays | None:
    """What was left out up to the last reply that counted; of lost ones nothing was sent."""
    counted, blob = received.coding.received if received.coding else -1, received.blob(name)
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
