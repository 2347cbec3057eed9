"""The server's end of coded links: strategies send and get models as they are.

A node that is known to have a model gets nothing of it again, or the difference alone. What
training changed in the decoded model is added to the one that the strategy sent, so that what
coding loses on the way to nodes does not add up over rounds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common import log

from flwr_distill.base.text import listed
from flwr_distill.protocol.arrays import Arrays, as_arrays, as_record
from flwr_distill.protocol.coded import (
    CODEC,
    Coding,
    DownCodec,
    UpCodec,
    codec_of,
    coded,
    decoded,
    unchanged,
    version_of,
)
from flwr_distill.protocol.messages import ARRAYS
from flwr_distill.server.settings import RunSettings
from flwr_distill.task.errors import SettingsError

WHOLE = "float16"
"""Codec of a model that is sent to a node without one to build a difference on."""
MAX_VERSIONS = 8
"""Models that the server keeps to build differences on."""


@dataclass(frozen=True)
class _Version:
    """A model as nodes have it."""

    name: str
    source: str
    """Hash of the model that the strategy sent."""
    arrays: Arrays


@dataclass
class ModelCodec:
    """Codes models to nodes, and decodes those in their replies.

    Parameters
    ----------
    down, up : str
        Codecs of models to nodes, and of what training changed in them.
    seed : int
        Of the run, for random rounding.
    """

    down: DownCodec = "float32"
    up: UpCodec = "float32"
    seed: int = 0
    able: Collection[int] = ()
    """Nodes that have said that they have codecs; others get plain messages."""
    _plain: set[int] = field(default_factory=set)
    round: int = 0
    _known: dict[int, str] = field(default_factory=dict)
    """The version that each node had last, as far as its replies show."""
    _sure: set[int] = field(default_factory=set)
    """Nodes that still have it, unless they lost their files: no error or resume came between."""
    _received: dict[int, dict[str, int]] = field(default_factory=dict)
    """Last round whose reply counted, by node and message type."""
    _versions: dict[str, _Version] = field(default_factory=dict)
    _sent: dict[int, tuple[str, str]] = field(default_factory=dict)
    """The last coded message to each node, and the version in it."""

    @property
    def is_used(self) -> bool:
        """Whether anything is coded."""
        return self.down != "float32" or self.up != "float32"

    def meet(self, names: Mapping[int, str], able: Collection[int]) -> None:
        """Take note of the nodes that have codecs; the log names the others once."""
        if plain := sorted(names[node] for node in names.keys() - {*able, *self._plain}):
            self._plain |= names.keys() - {*able}
            text = "%s: no codecs, so their models travel whole, as float32 (they run another "
            text += "version, or no flwr-distill node)"
            if self.is_used:
                log(WARNING, text, listed(plain))
        self.able = able

    @contextmanager
    def coding(self, messages: Sequence[Message]) -> Iterator[None]:
        """Code the models in messages within the block, in which they are pushed."""
        own = [message.content for message in messages]
        made: dict[tuple[int, str], tuple[ArrayRecord, _Version, str]] = {}
        hashes: dict[int, str] = {}
        versions: dict[int, str] = {}
        if self.is_used:
            for place, message in enumerate(messages):
                node, model = (
                    message.metadata.dst_node_id,
                    message.content.array_records.get(ARRAYS),
                )
                if model is None or node not in self.able:
                    continue
                if id(model) not in hashes:
                    hashes[id(model)] = version_of(as_arrays(model))
                source = hashes[id(model)]
                message.content, versions[node] = self._coded(message, source, place, made)
        try:
            yield
        finally:
            for message, content in zip(messages, own, strict=True):
                message.content = content
        for message in messages:
            if (node := message.metadata.dst_node_id) in versions:
                self._sent[node] = message.metadata.message_id, versions[node]
        self._forget_versions()

    def decode(self, message: Message, reply: Message) -> None:
        """Decode the model in a reply with content in place; CodecError if it cannot be."""
        model = reply.content.array_records.get(ARRAYS)
        sent = message.content.array_records.get(ARRAYS)
        if model is not None and sent is not None and self.is_used:
            reply.content[ARRAYS] = decoded(model, as_arrays(sent))

    def note(self, reply: Message, *, counts: bool) -> None:
        """Note what a node's reply shows: what the node has, and whether its reply counts."""
        node, about = reply.metadata.src_node_id, reply.metadata
        name, version = self._sent.get(node, ("", ""))
        if name != about.reply_to_message_id:
            return
        if not counts:
            self._sure.discard(node)
            return
        self._known[node] = version
        self._sure.add(node)
        self._received.setdefault(node, {})[about.message_type] = self.round

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs to code as this one does."""
        if not self.is_used:
            return {}
        is_delta = codec_of(self.down)[1]  # only these build on what nodes have
        return {
            "known": dict(self._known),
            "received": {node: dict(rounds) for node, rounds in self._received.items()},
            "versions": {
                name: {"source": version.source, "arrays": dict(version.arrays)}
                for name, version in self._versions.items()
                if is_delta
            },
        }

    def load_state_dict(self, state: Mapping[str, Any], returned: Mapping[int, int]) -> None:
        """Take over what a checkpoint has; `returned` are the nodes' ids by their earlier ones."""
        for old, node in returned.items():
            if old in state.get("known", {}):
                self._known[node] = state["known"][old]
            if old in state.get("received", {}):
                self._received[node] = dict(state["received"][old])
        for name, version in state.get("versions", {}).items():
            self._versions[name] = _Version(name, version["source"], version["arrays"])

    def _coded(
        self,
        message: Message,
        source: str,
        place: int,
        made: dict[tuple[int, str], tuple[ArrayRecord, _Version, str]],
    ) -> tuple[RecordDict, str]:
        """A message's content with its model coded for the node, and the version that this is."""
        node, model = message.metadata.dst_node_id, message.content.array_records[ARRAYS]
        base = self._versions.get(self._known.get(node, ""))
        if base is not None and base.source == source:
            record, version, start = unchanged(base.arrays), base, base.name
        else:
            key = id(model), base.name if base else ""
            if key not in made:
                made[key] = self._new_version(model, source, base)
            record, version, start = made[key]
        if start and node not in self._sure:
            record, start = as_record(version.arrays), ""
        about = Coding(
            up=self.up,
            version=version.name,
            base=start,
            round=self.round,
            received=self._received.get(node, {}).get(message.metadata.message_type, -1),
            seed=_seed(self.seed, self.round, message.metadata.message_type, place),
        )
        content = RecordDict({**message.content, ARRAYS: record})
        content[CODEC] = ConfigRecord(about.model_dump(by_alias=True))
        return content, version.name

    def _new_version(
        self, model: ArrayRecord, source: str, base: _Version | None
    ) -> tuple[ArrayRecord, _Version, str]:
        """Code a model; give it, what nodes make of it, and the version that it builds on."""
        codec, is_delta = codec_of(self.down)
        if is_delta and base is None:
            codec = WHOLE
        if codec == "float32":
            version = _Version(source, source, as_arrays(model))
            record, start = model, ""
        else:
            arrays, start = (base.arrays, base.name) if is_delta and base else (None, "")
            rng = np.random.default_rng(_seed(self.seed, source, start))
            record, _ = coded(model, codec, rng, arrays)
            values = as_arrays(decoded(record, arrays))
            version = _Version(version_of(values), source, values)
        self._versions[version.name] = version
        return record, version, start

    def _forget_versions(self) -> None:
        """Keep the versions that nodes have, the latest ones first."""
        sent = {version for _, version in self._sent.values()}
        needed = sent.union(self._known.values())
        for name in [name for name in self._versions if name not in needed]:
            del self._versions[name]
        while len(self._versions) > max(MAX_VERSIONS, len(sent)):
            del self._versions[next(iter(self._versions))]


def codec_of_run(settings: RunSettings) -> ModelCodec:
    """Make a run's codec; SettingsError if another setting excludes it."""
    codec = ModelCodec(settings.down_codec, settings.up_codec, settings.seed)
    if settings.secure_sums and codec.up != "float32":
        raise SettingsError(
            "secure sums are of exact numbers under masks",
            where="up-codec",
            value=codec.up,
            remedy="set it to float32 (down-codec may stay), or secure-sums to false",
        )
    return codec


def _seed(*parts: object) -> int:
    """A seed from a run's seed and what it is for."""
    found = hashlib.sha256(" ".join(map(str, parts)).encode()).digest()
    return int.from_bytes(found[:8], "big") >> 1
