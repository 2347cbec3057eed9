"""The server's end of coded links: strategies send and get models as they are.

A node that is known to have a model gets nothing of it again, or the difference alone. What
training changed in the decoded model is added to the one that the strategy sent, so that what
coding loses on the way to nodes does not add up over rounds.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.common import log

from flwr_distill.base.text import listed
from flwr_distill.protocol.arrays import Arrays, DecodedArray, as_arrays, as_record
from flwr_distill.protocol.coded import (
    BESIDE,
    CODEC,
    PREFIX,
    Coding,
    DownCodec,
    UpCodec,
    check_claims,
    codec_of,
    coded,
    decoded,
    unchanged,
    version_of,
)
from flwr_distill.protocol.messages import ARRAYS
from flwr_distill.protocol.method import Method
from flwr_distill.protocol.parcels import FOR_CHANGES
from flwr_distill.server.settings import RunSettings
from flwr_distill.task.errors import SettingsError

FOR_WHOLE = {"int4": "int8", "topk": "int8"}
"""In place of these, for what is no difference: records beside the model, and a model to nodes
without one to build a difference on."""
SHARE_WITH_BASE = 0.9
"""Least share of the nodes that get a model, which must have what a difference builds on: each of
the others gets the model exact, in more bytes than whole and coded."""
MAX_KEPT = 2
"""Models that a node keeps: the last one of training, and one that it got for something else."""
MAX_VERSIONS = 8
"""Models that the server keeps, unless replies may be later."""


@dataclass(frozen=True)
class _Version:
    """A model as all nodes have it that get it."""

    name: str
    source: str
    """Hash of the model that the strategy sent."""
    arrays: Arrays
    record: ArrayRecord | None = None
    """How it is sent to nodes that have its base; None if whole."""
    base: str = ""

    @cached_property
    def whole(self) -> ArrayRecord:
        """Exact, for nodes without its base: one record for all of them."""
        return as_record(self.arrays)

    @cached_property
    def same(self) -> ArrayRecord:
        """For nodes that have it."""
        return unchanged(self.arrays)


@dataclass
class ModelCodec:
    """Codes models to nodes, and decodes those in their replies.

    Parameters
    ----------
    down, up : str
        Codecs of models to nodes, and of what training changed in them.
    seed : int
        Of the run, for random rounding.
    beside : tuple of str
        Array records beside the model that are coded, too (`Method.coded`).
    answered : collection of str
        Types of messages whose answers have a record `ARRAYS`, whether they bring a model or not.
    max_versions : int
        Models that the server keeps, to build differences on and for replies that come late.
    """

    down: DownCodec = "float32"
    up: UpCodec = "float32"
    seed: int = 0
    beside: tuple[str, ...] = ()
    answered: Collection[str] = ()
    max_versions: int = MAX_VERSIONS
    round: int = 0
    may_change: bool = False
    """Whether codecs change during the run: what nodes have is noted before anything is coded."""
    _is_paused: bool = False
    _names: Mapping[int, str] = field(default_factory=dict)
    _able: Mapping[int, Collection[str]] = field(default_factory=dict)
    _known: dict[int, list[str]] = field(default_factory=dict)
    """The versions that each node had last, as far as its replies show; the latest first."""
    _sure: set[int] = field(default_factory=set)
    """Nodes that still have them, as no error and no resume came between."""
    _received: dict[int, dict[str, int]] = field(default_factory=dict)
    """Last round whose reply counted, by node and message type."""
    _versions: dict[str, _Version] = field(default_factory=dict)
    _sent: dict[int, tuple[str, str]] = field(default_factory=dict)
    """The last coded message to each node, and the version in it."""
    _got: dict[int, tuple[int, str]] = field(default_factory=dict)
    """The round in which a node last got a model that its replies show, and the version."""
    _asked: dict[int, tuple[str, str]] = field(default_factory=dict)
    """The last message without a model to each node, if it awaits an answer, and the version to
    which that is the difference; '' for none."""

    @property
    def is_used(self) -> bool:
        """Whether anything is coded, or may be later."""
        is_coded = self.down != "float32" or self.up != "float32"
        return (is_coded or self.may_change) and not self._is_paused

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Send models exactly within the block, and note nothing of what nodes have."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def meet(self, names: Mapping[int, str], able: Mapping[int, Collection[str]]) -> None:
        """Take note of the nodes that have codecs, and of these; the log names the others once."""
        plain = sorted(names[node] for node in names.keys() - {*able} - self._names.keys())
        if plain and self.is_used:
            text = "%s: no codecs, so their models travel whole, as float32 (they run another "
            text += "version, or no flwr-distill node)"
            log(WARNING, text, listed(plain))
        self._names, self._able = dict(names), dict(able)

    @contextmanager
    def coding(self, messages: Sequence[Message]) -> Iterator[None]:
        """Code the models in messages within the block, in which they are pushed."""
        versions = self._versions_of(messages) if self.is_used else {}
        others = self._others_of(messages) if self.is_used else {}
        plain: list[tuple[Message, RecordDict, _Version | None]] = []
        for place, message in enumerate(messages):
            version = versions.get(id(message.content.array_records.get(ARRAYS)))
            if version and message.metadata.dst_node_id in self._able:
                plain.append((message, message.content, version))
                message.content = self._coded(message, version, place, others)
            elif self._answers_alone(message):
                plain.append((message, message.content, None))
                message.content = self._asking(message, place)
        try:
            yield
        finally:
            for message, content, _ in plain:
                message.content = content
        for message, _, version in plain:
            node, message_id = message.metadata.dst_node_id, message.metadata.message_id
            if version is None:
                base = self._base_of(node)
                self._asked[node] = message_id, base.name if base else ""
            else:
                self._sent[node] = message_id, version.name
        self._forget_versions()

    def on_nodes(self, model: Arrays) -> Arrays:
        """A model as nodes have it that were sent it last; unchanged if it was not coded."""
        source = version_of(model) if self._versions else ""
        versions = [one.arrays for one in self._versions.values() if one.source == source]
        return versions[-1] if versions else model

    def decode(self, message: Message, reply: Message, most: int) -> None:
        """Decode a reply with content in place; it has so many bytes at most then.

        Raises CodecError if it cannot be decoded.
        """
        model = reply.content.array_records.get(ARRAYS)
        sent = message.content.array_records.get(ARRAYS)
        if sent is None:
            message_id, base = self._asked.pop(reply.metadata.src_node_id, ("", ""))
            if model is not None and message_id == reply.metadata.reply_to_message_id:
                check_claims(model.values(), most)
                start = self._versions[base].arrays if base in self._versions else {}
                reply.content[ARRAYS] = decoded(model, start)
        if sent is None or not self.is_used:
            return
        if model is not None:
            start = as_arrays(sent)
            plain = {n: a for n, a in model.items() if not a.stype.startswith(PREFIX)}
            trained = decoded(model, start, exact=False)
            trained.update(self._from_start(plain, start, reply))
            reply.content[ARRAYS] = trained
        records = reply.content.array_records
        beside = {name: records[name] for name in self.beside if name in records}
        check_claims((array for each in beside.values() for array in each.values()), most)
        for name, record in beside.items():
            reply.content[name] = decoded(record, exact=False)

    def _from_start(
        self, plain: Mapping[str, Array], start: Arrays, reply: Message
    ) -> dict[str, Array]:
        """Arrays that a node sends uncoded, as if it had trained `start` itself.

        It trained the coded one. Without this, each round would lose again what coding loses, with
        all that training has moved by less.
        """
        message_id, name = self._sent.get(reply.metadata.src_node_id, ("", ""))
        version = self._versions.get(name)
        if version is None or message_id != reply.metadata.reply_to_message_id:
            return {}
        moved: dict[str, Array] = {}
        for key, array in as_arrays(ArrayRecord(dict(plain))).items():
            before, sent = start.get(key), version.arrays.get(key)
            if before is None or sent is None or array.dtype != np.float32:
                continue
            if array.shape == before.shape and not np.array_equal(before, sent):
                change = np.subtract(array, sent, dtype=np.float64)
                moved[key] = DecodedArray((before + change).astype(np.float32))
        return moved

    def note(self, reply: Message, *, counts: bool) -> None:
        """Note what a node's reply shows: what the node has, and whether its reply counts."""
        node, about = reply.metadata.src_node_id, reply.metadata
        name, version = self._sent.get(node, ("", ""))
        if name != about.reply_to_message_id:
            return
        if not counts:
            self._sure.discard(node)
            return
        earlier = self._known.get(node, []) if node in self._sure else []
        self._known[node] = [version, *(name for name in earlier if name != version)][:MAX_KEPT]
        self._sure.add(node)
        self._got[node] = self.round, version
        self._received.setdefault(node, {})[about.message_type] = self.round

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs to code as this one does."""
        if not self.is_used:
            return {}
        # only these build on what nodes have
        is_delta = codec_of(self.down)[1] or self.may_change
        return {
            "known": {node: list(names) for node, names in self._known.items()},
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
                self._known[node] = list(state["known"][old])
            if old in state.get("received", {}):
                self._received[node] = dict(state["received"][old])
        for name, version in state.get("versions", {}).items():
            self._versions[name] = _Version(name, version["source"], version["arrays"])

    def _versions_of(self, messages: Sequence[Message]) -> dict[int, _Version]:
        """The versions of the models in messages, by the models' ``id``."""
        nodes: dict[int, tuple[ArrayRecord, list[int]]] = {}
        for message in messages:
            node, model = message.metadata.dst_node_id, message.content.array_records.get(ARRAYS)
            if model and node in self._able:
                nodes.setdefault(id(model), (model, []))[1].append(node)
        return {key: self._version_of(model, asked) for key, (model, asked) in nodes.items()}

    def _answers_alone(self, message: Message) -> bool:
        """Whether a message without a model is answered with arrays, which its node codes."""
        codecs = self._able.get(message.metadata.dst_node_id, ())
        has_codec = self.up != "float32" and BESIDE in codecs
        is_answered = message.metadata.message_type in self.answered
        is_alone = is_answered and not message.content.array_records
        return self.is_used and has_codec and is_alone

    def _base_of(self, node: int) -> _Version | None:
        """The model that a node got in this round; a resumed run knows no earlier ones."""
        got, name = self._got.get(node, (-1, ""))
        return self._versions.get(name) if got == self.round and node in self._sure else None

    def _asking(self, message: Message, place: int) -> RecordDict:
        """A message's content with a request to code the answer."""
        base = self._base_of(message.metadata.dst_node_id)
        about = Coding(
            up=FOR_CHANGES.get(self.up, self.up),
            base=base.name if base else "",
            round=self.round,
            seed=_seed(self.seed, self.round, message.metadata.message_type, place),
        )
        return RecordDict({**message.content, CODEC: about.to_record()})

    def _others_of(self, messages: Sequence[Message]) -> dict[int, ArrayRecord]:
        """Records beside the models in messages, coded, by the ``id`` of the plain ones."""
        base, others = codec_of(self.down)[0], dict[int, ArrayRecord]()
        codec = FOR_WHOLE.get(base, base)
        for message in messages if codec != "float32" else ():
            for name in self.beside:
                record = message.content.array_records.get(name)
                if record is not None and id(record) not in others:
                    rng = np.random.default_rng(_seed(self.seed, self.round, name))
                    others[id(record)] = coded(record, codec, rng)[0]
        return others

    def _version_of(self, model: ArrayRecord, nodes: Sequence[int]) -> _Version:
        """The one version of a model; a new one builds on what almost all of these nodes have."""
        arrays = as_arrays(model)
        source = version_of(arrays)
        for version in self._versions.values():
            if version.source == source:
                return version
        codec, is_delta = codec_of(self.down)
        base = self._base_for(nodes, arrays) if is_delta else None
        if is_delta and base is None:
            codec = FOR_WHOLE.get(codec, codec)
        if codec == "float32":
            version = _Version(source, source, arrays, model)
        else:
            start, name = (base.arrays, base.name) if base else (None, "")
            rng = np.random.default_rng(_seed(self.seed, source, name))
            record, _ = coded(model, codec, rng, start)
            values = as_arrays(decoded(record, start))
            version = _Version(version_of(values), source, values, record, name)
        self._versions[version.name] = version
        return version

    def _base_for(self, nodes: Sequence[int], arrays: Arrays) -> _Version | None:
        """The version of such arrays that most of these nodes have, if enough do; the latest.

        Nodes read a model only if it is about as large as what is built on it.
        """
        counts = Counter(name for node in nodes for name in self._known.get(node, []))
        known = [
            version
            for name, version in self._versions.items()
            if counts[name] >= SHARE_WITH_BASE * len(nodes)
            and _shapes(version.arrays) == _shapes(arrays)
        ]
        return max(reversed(known), key=lambda version: counts[version.name], default=None)

    def _coded(
        self,
        message: Message,
        version: _Version,
        place: int,
        others: Mapping[int, ArrayRecord],
    ) -> RecordDict:
        """A message's content with a version of its model, as its node can read it."""
        node, message_type = message.metadata.dst_node_id, message.metadata.message_type
        known = self._known.get(node, []) if node in self._sure else []
        if version.name in known:
            record, base = version.same, version.name
        elif version.record is not None and version.base in ("", *known):
            record, base = version.record, version.base
        else:
            record, base = version.whole, ""
        has_beside = BESIDE in self._able[node]
        about = Coding(
            up=self.up,
            beside=list(self.beside) if has_beside and self.up != "float32" else [],
            version=version.name,
            base=base,
            keep=known,
            round=self.round,
            received=self._received.get(node, {}).get(message_type, -1),
            seed=_seed(self.seed, self.round, message_type, place),
        )
        plain = message.content
        content = RecordDict({**plain, ARRAYS: record, CODEC: about.to_record()})
        for name in self.beside if has_beside else ():
            if name in plain:
                content[name] = others.get(id(plain[name]), plain[name])
        return content

    def _forget_versions(self) -> None:
        """Keep those versions that nodes have, and of these the latest."""
        sent = {version for _, version in [*self._sent.values(), *self._asked.values()]}
        needed = sent.union(*self._known.values())
        for name in [name for name in self._versions if name not in needed]:
            del self._versions[name]
        while len(self._versions) > self.max_versions:
            del self._versions[next(iter(self._versions))]


def codec_of_run(settings: RunSettings, method: Method | None = None) -> ModelCodec:
    """Make a run's codec, ``auto`` beginning as float32; SettingsError if a setting excludes it."""
    down: DownCodec = "float32" if settings.down_codec == "auto" else settings.down_codec
    up: UpCodec = "float32" if settings.up_codec == "auto" else settings.up_codec
    phases = method.phases if method else ()
    answered = {
        p.message_type for p in phases if any(ARRAYS in reply.arrays for reply in p.replies)
    }
    beside = method.coded if method else ()
    versions = max(MAX_VERSIONS, settings.max_staleness + 1) if settings.buffer else MAX_VERSIONS
    codec = ModelCodec(down, up, settings.seed, beside, answered, versions)
    if settings.secure_sums and codec.up != "float32":
        raise SettingsError(
            "secure sums are of exact numbers under masks",
            where="up-codec",
            value=codec.up,
            remedy="set it to float32 (down-codec may stay), or secure-sums to false",
        )
    return codec


def _shapes(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in arrays.items()}


def _seed(*parts: object) -> int:
    """A seed from a run's seed and what it is for."""
    found = hashlib.sha256(" ".join(map(str, parts)).encode()).digest()
    return int.from_bytes(found[:8], "big") >> 1
