"""Rejects broken and hostile replies before a strategy sees them.

Each reply is checked against its phase's schemas as it arrives. Replies that are averaged are
then compared with each other.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import WARNING
from statistics import median
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log

from flwr_distill.protocol.arrays import Arrays, RecordArrays, as_arrays, decode
from flwr_distill.protocol.messages import (
    ARRAYS,
    CONFIG,
    DELIVERY,
    METRICS,
    NUM_EXAMPLES,
    PARCEL,
    REJECTED,
    ROUTE,
)
from flwr_distill.protocol.method import Phase
from flwr_distill.protocol.outliers import MIN_NODES, absurdly_large, capped, idle, update_norm
from flwr_distill.protocol.schema import check_numbers
from flwr_distill.strategies.common.directory import Directory

HISTORY = 20
"""Rounds whose median norm the norms of few replies are compared with."""


@dataclass
class Screening:
    """Says why replies are rejected: one by one as they arrive, and compared with each other.

    If a message carries a model, the reply is compared with that one. But the types are always
    those of the run's `model`: Flower's strategies turn integers, such as BatchNorm's count of
    batches, into floats, and nodes return them as integers.
    """

    phases: Mapping[str, Phase]  # of the run, by message type
    directory: Directory = field(default_factory=Directory)  # knows how many samples nodes have
    model: Arrays = field(default_factory=dict)
    norm_threshold: float = 5.0  # see `protocol.outliers.absurdly_large`

    def __post_init__(self) -> None:
        self._earlier: dict[tuple[str, str], deque[float]] = defaultdict(
            lambda: deque(maxlen=HISTORY)
        )
        """Median norms of the last rounds, by phase and record."""
        self._norms: dict[tuple[int, str], dict[str, float]] = {}
        """Norm of each record of replies since the last comparison, by node and message."""
        self._corrected: set[int] = set()
        """Nodes that claimed more samples than they have, for the log."""
        self._sent: ArrayRecord | None = None
        self._start: Arrays = {}

    def state_dict(self) -> list[list[Any]]:
        """Norms of the last rounds, for a checkpoint: phase, record and medians."""
        return [[*key, list(medians)] for key, medians in self._earlier.items()]

    def load_state_dict(self, state: Iterable[Sequence[Any]]) -> None:
        """Take over what a checkpoint has."""
        for phase, record, medians in state:
            self._earlier[phase, record].extend(medians)

    def check(self, message: Message, reply: Message) -> str:
        """Why a reply with content matches none of its phase's schemas; empty if it matches one."""
        phase = self.phases.get(message.metadata.message_type)
        checks = [schema.check for schema in phase.replies] if phase else [_check_readable]
        reasons = []
        for check in checks:
            try:
                check(reply.content, self.start_of(message))
                _check_parcels(message.content, reply.content)
                if phase:
                    _check_rejected(message.content, reply.content)
                    if phase.averaged and self.norm_threshold:
                        self._norms[_key(message)] = self._norms_of(message, reply.content)
                return ""
            except ValueError as error:
                reasons.append(str(error))
        return reasons[0]

    def compare(
        self,
        message_type: str,
        messages: Mapping[int, Message],
        replies: Iterable[Message],
        connected: Callable[[], Iterable[int]],
    ) -> dict[int, str]:
        """Why replies that stand out are rejected, by node; claims of the others are corrected.

        `messages` are by node; `connected` lists the nodes that can take part.
        """
        checked, self._norms = self._norms, {}
        self._sent, self._start = None, {}  # not in memory until the next round's replies
        phase = self.phases.get(message_type)
        if phase is None or not phase.averaged:
            return {}
        trained = {
            reply.metadata.src_node_id: reply.content
            for reply in replies
            if reply.has_content() and NUM_EXAMPLES in reply.content.metric_records.get(METRICS, {})
        }
        if not trained:  # as under masks
            return {}
        if phase.rates:
            _drop_optional_metrics(trained, {NUM_EXAMPLES, *phase.rates})
        reasons = _without_usual_parts(trained)
        trained = {node: content for node, content in trained.items() if node not in reasons}
        own = phase.averaged == "own"
        # Of held-out samples a node has said nothing before: claims are limited by each other.
        known = {*connected(), *messages} if own and not phase.rates else ()
        samples = self._samples(known, trained, own=own)
        reasons |= self._outliers(phase, messages, trained, samples, checked)
        for node, count in samples.items():
            trained[node].metric_records[METRICS][NUM_EXAMPLES] = count
        return reasons

    def _samples(
        self, known: Collection[int], trained: Mapping[int, RecordDict], *, own: bool
    ) -> dict[int, int]:
        """Samples that count, by node: of its `own` no more than others' claims allow.

        Of `known` nodes it is the claims at the first meeting that count.
        """
        claims = {
            node: int(content.metric_records[METRICS][NUM_EXAMPLES])  # type: ignore[arg-type]
            for node, content in trained.items()
        }
        if not own:
            return claims
        limits = capped(claims, self.directory.most_samples) | self.directory.samples(known)
        for node, claim in claims.items():
            first = self.directory.num_examples.get(node, limits[node])
            # The roster warns of large ones.
            if claim > max(first, limits[node]) and node not in self._corrected:
                self._corrected.add(node)
                text = "Sample count of node %d capped at %d (it claimed %d)"
                log(WARNING, text, node, limits[node], claim)
        return {node: min(claim, limits[node]) for node, claim in claims.items()}

    def _outliers(
        self,
        phase: Phase,
        messages: Mapping[int, Message],
        trained: Mapping[int, RecordDict],
        samples: Mapping[int, int],
        checked: Mapping[tuple[int, str], dict[str, float]],
    ) -> dict[int, str]:
        if not self.norm_threshold:
            return {}
        norms: dict[str, dict[int, float]] = defaultdict(dict)
        for node, content in trained.items():
            message = messages[node]
            known = checked.get(_key(message)) or self._norms_of(message, content)
            for name in content.array_records:
                norms[name][node] = known[name]
        reasons: dict[int, str] = {}
        # The node with the most samples that count may well have the longest update, too.
        most = self.directory.most_samples
        weighted_threshold = self.norm_threshold + math.log(max(most, 1)) if most else 0
        for name, by_node in norms.items():
            earlier = self._earlier[phase.message_type, name]
            past = {-1 - i: n for i, n in enumerate(earlier)} if len(by_node) < MIN_NODES else {}
            for node in absurdly_large({**past, **by_node}, self.norm_threshold):
                if node in by_node:
                    reasons.setdefault(node, f"the norm of its {name} exceeds norm-threshold")
            for node in idle(by_node) if name == ARRAYS else ():
                reasons.setdefault(node, "its update is next to nothing beside the others'")
            weighted = {node: samples[node] * norm for node, norm in by_node.items()}
            for node in absurdly_large(weighted, weighted_threshold):
                reasons.setdefault(node, f"the norm of its {name}, times samples, is far too large")
            if usual := [norm for node, norm in by_node.items() if node not in reasons]:
                earlier.append(median(usual))
        return reasons

    def _norms_of(self, message: Message, content: RecordDict) -> dict[str, float]:
        start = self.start_of(message)
        return {
            name: update_norm(RecordArrays(record), start if name == ARRAYS else None)
            for name, record in content.array_records.items()
        }

    def start_of(self, message: Message) -> Arrays:
        """The model that a node starts from: the message's, else the run's."""
        record = message.content.array_records.get(ARRAYS)
        if record is None:
            return self.model
        if record is not self._sent:  # most strategies send the same one to all nodes
            self._sent = record
            self._start = typed(as_arrays(record), self.model)
        return self._start


def typed(arrays: Arrays, model: Arrays) -> Arrays:
    """The arrays in the types of a model's: Flower's means of integers are floats."""
    return {
        name: array.astype(model[name].dtype, copy=False) if name in model else array
        for name, array in arrays.items()
    }


def _key(message: Message) -> tuple[int, str]:
    return message.metadata.dst_node_id, message.metadata.message_id


def _check_parcels(sent: RecordDict, content: RecordDict) -> None:
    for name, parcel in content.config_records.items():
        stem, dot, rank = name.partition(".")
        if stem != PARCEL:
            continue
        route = sent.config_records.get(f"{ROUTE}{dot}{rank}", ConfigRecord())
        size, largest = parcel.get("num-bytes"), route.get("largest", 0)
        if isinstance(size, int) and isinstance(largest, int) and size > largest:
            raise ValueError(f"its {name} of {size} bytes is above the {largest} allowed")


def _check_rejected(sent: RecordDict, content: RecordDict) -> None:
    received = [name for name in sent if name.partition(".")[0] in (PARCEL, DELIVERY)]
    rejected = content.metric_records.get(METRICS, MetricRecord()).get(REJECTED, 0)
    if isinstance(rejected, int) and rejected > len(received):
        raise ValueError(f"it rejects {rejected} of the {len(received)} that it was sent")
    ranks = {"0", *(name.partition(".")[2] for name in received)}  # 0: a leader's own model
    for key in content.config_records.get(CONFIG, ConfigRecord()):
        stem, _, rank = key.partition(".")
        if stem == REJECTED and rank not in ranks:
            raise ValueError(f"it rejects {key[:20]}, which it was not sent")


def _check_readable(content: RecordDict, model: Arrays) -> None:
    """Check a reply of a phase that no method declares."""
    for record in content.array_records.values():
        decode(record)
    for metrics in content.metric_records.values():
        check_numbers(metrics)


Part = tuple[str, str, int]
"""Name of a record, key of a metric in it if any, and the length of its list."""


def _drop_optional_metrics(replies: Mapping[int, RecordDict], needed: set[str]) -> None:
    """Remove metrics that are not needed and not in all replies.

    A node's policy may withhold a loss (`node.evaluation`); its rate counts all the same.
    """
    metrics = [content.metric_records[METRICS] for content in replies.values()]
    of_all = needed.union(set.intersection(*map(set, metrics)))
    for record in metrics:
        for key in record.keys() - of_all:
            del record[key]


def _without_usual_parts(replies: Mapping[int, RecordDict]) -> dict[int, str]:
    """Why replies are rejected that miss what more than half have, by node.

    What half or fewer have is removed from the others: Flower's strategies raise if replies differ,
    and one of two nodes must not evict the other by what it adds.
    """
    parts = {node: _parts(content) for node, content in replies.items()}
    counts = Counter(part for of_node in parts.values() for part in of_node)
    usual = {part for part, count in counts.items() if 2 * count > len(replies)}
    reasons = {}
    for node, content in replies.items():
        if missing := usual - parts[node]:
            name, key, _ = min(missing)
            reasons[node] = f"it is missing {key or name!r} as most replies have it"
        for name, key, _ in parts[node] - usual:
            if key:
                del content.metric_records[name][key]
            else:
                del content[name]
    return reasons


def _parts(content: RecordDict) -> set[Part]:
    metrics = (
        (name, key, len(value) if isinstance(value, list) else 0)
        for name, record in content.metric_records.items()
        for key, value in record.items()
    )
    return {*((name, "", 0) for name in content.array_records), *metrics}
