"""Virtual nodes on coded links, so that a simulation gives what real nodes give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakValueDictionary

from flwr.app import ArrayRecord, Error, Message, RecordDict

from flwr_distill.node.codec import NodeCodec
from flwr_distill.protocol.codecs import CodecError
from flwr_distill.protocol.coded import CODEC
from flwr_distill.protocol.meeting import DESCRIBE
from flwr_distill.protocol.messages import NOTICE
from flwr_distill.protocol.replies import UNKNOWN
from flwr_distill.simulation.grid import Pool
from flwr_distill.simulation.workers import Config
from flwr_distill.storage.store import DURABLE
from flwr_distill.task.errors import SettingsError

LOOPBACK = True
"""What virtual nodes say of their links."""


class Coded:
    """A pool of nodes that decode what another pool gets, and encode what it answers.

    Parameters
    ----------
    pool : Pool
        Answers the decoded messages.
    nodes : Mapping[int, Mapping[str, bool | int | float | str]]
        Node config of each, by Flower's node id.
    run_id : int
        Of the run.
    """

    def __init__(self, pool: Pool, nodes: Mapping[int, Config], run_id: int) -> None:
        self._pool = pool
        self._nodes = nodes
        self._run_id = run_id
        self._sent: dict[str, tuple[Message, NodeCodec]] = {}
        self._failed: list[tuple[str, RecordDict | Error]] = []
        self._models: WeakValueDictionary[str, ArrayRecord] = WeakValueDictionary()
        """By version: what many nodes get is in memory once, and once in a file for workers."""

    def submit(self, messages: Sequence[Message]) -> None:
        """Decode messages, and give them to the pool."""
        readable = []
        for message in messages:
            about = message.metadata
            message.content.pop(NOTICE, None)  # virtual nodes have no owners to read it
            if CODEC not in message.content and about.message_type != DESCRIBE:
                readable.append(message)
                continue
            node = self._nodes[about.dst_node_id]
            durable = bool(node.get(DURABLE, True))
            codec = NodeCodec(
                str(node["state-dir"]), durable=durable, loopback=LOOPBACK, shared=self._models
            )
            own = Message(RecordDict(dict(message.content)), about.dst_node_id, about.message_type)
            own.metadata.__dict__.update(vars(about), _run_id=self._run_id)
            try:
                codec.receive(own)
            except (CodecError, SettingsError) as error:
                self._failed.append((about.message_id, Error(UNKNOWN, str(error))))
                continue
            self._sent[about.message_id] = own, codec
            readable.append(own)
        self._pool.submit(readable)

    def wait(self, seconds: float) -> list[tuple[str, RecordDict | Error]]:
        """Wait for replies; return them encoded, by message id, as soon as there is one."""
        answers, self._failed = self._failed, []
        for name, answer in self._pool.wait(0 if answers else seconds):
            if name in self._sent:
                message, codec = self._sent.pop(name)
                reply = Message(answer, reply_to=message)
                reply = codec.finish(reply, codec.encode(reply), message)
                answer = reply.content if reply.has_content() else reply.error
            answers.append((name, answer))
        return answers
