"""Counts of nodes' held-out samples: taken out of replies, checked, scored and added up."""

from collections import defaultdict
from collections.abc import Sequence
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, MessageType, MetricRecord
from flwr.common import log

from flwr_distill.base.text import counted, listed
from flwr_distill.protocol.counts import COUNTS, REASONS, read_counts, why_withheld
from flwr_distill.protocol.meeting import one_line
from flwr_distill.protocol.messages import METRICS, NUM_EXAMPLES
from flwr_distill.task.scores import Counts, intervals, scores, summary

MAX_INTERVALS = 100
"""Nodes of a round that get intervals of their own, at some ten milliseconds each."""
NOT_SENT = "its reply has none (an edge, an app of its own, or an older version)"
OTHER_MESSAGE = "the strategy evaluates by messages of its own, whose replies have none"


class NodeCounts:
    """Counts of the nodes that evaluate in a round; only their sum and their scores are kept.

    In the sum a node's counts weigh as many samples as screening has left of its claim.

    Parameters
    ----------
    classes : int
        Of the run's data.
    wanted : bool
        Whether the run asks for counts (``evaluate.counts``); others are dropped.
    seed : int
        Of the intervals.
    """

    def __init__(self, classes: int, *, wanted: bool, seed: int = 0) -> None:
        self._classes = classes
        self._wanted = wanted
        self._seed = seed
        self._round = -1
        self._total: Counts | None = None
        self._nodes: set[int] = set()
        self._reported: set[tuple[int, str]] = set()

    def take(
        self, server_round: int, phase: str, replies: Sequence[Message]
    ) -> dict[int, dict[str, float]]:
        """Remove the counts from usable replies; give the scores of each new node of the round.

        The log says once of each node why it has none.
        """
        if server_round != self._round:
            self._round, self._total, self._nodes = server_round, None, set()
        missing: dict[str, list[int]] = defaultdict(list)
        found: dict[int, dict[str, float]] = {}
        for reply in replies:
            if not reply.has_content():
                continue
            record = reply.content.config_records.get(COUNTS)
            if record is not None:
                del reply.content[COUNTS]
            node = reply.metadata.src_node_id
            if not self._wanted or phase.partition(".")[0] != "evaluate" or node in self._nodes:
                continue
            try:
                counts = self._read(phase, record, reply)
            except ValueError as error:
                missing[one_line(error)].append(node)
                continue
            self._nodes.add(node)
            weighed = counts.at_most(_samples(reply))
            self._total = weighed if self._total is None else self._total + weighed
            found[node] = self._scores_of(counts)
        self._log(missing)
        return found

    def summary(self, server_round: int) -> dict[str, Any] | None:
        """Metrics of all counted nodes of a round together; None without any."""
        if server_round != self._round or self._total is None:
            return None
        generator = np.random.default_rng([self._seed, server_round])
        numbers = {"nodes": len(self._nodes), "samples": self._total.samples}
        return numbers | summary(self._total, generator)

    def _read(self, phase: str, record: ConfigRecord | None, reply: Message) -> Counts:
        if phase != MessageType.EVALUATE:
            raise ValueError(OTHER_MESSAGE)
        if record is None:
            raise ValueError(NOT_SENT)
        if reason := why_withheld(record):
            raise ValueError(REASONS[reason])
        try:
            counts = read_counts(record, self._classes)
            if counts.samples < (samples := _samples(reply)):
                raise ValueError(
                    f"they are of {counts.samples} samples, and the reply of {samples}"
                )
        except ValueError as error:
            raise ValueError(f"rejected: {error}") from None
        return counts

    def _scores_of(self, counts: Counts) -> dict[str, float]:
        """Scores of a node, by the names of its metrics in the journal."""
        numbers = {f"eval-{name}": value for name, value in scores(counts).items()}
        if len(self._nodes) <= MAX_INTERVALS:
            generator = np.random.default_rng([self._seed, self._round, len(self._nodes)])
            for name, (low, high) in intervals(counts, generator).items():
                numbers |= {f"eval-{name}-low": low, f"eval-{name}-high": high}
        known = {k.replace("_", "-"): v for k, v in numbers.items() if np.isfinite(v)}
        return {key: value for key, value in known.items() if key != "eval-accuracy"}

    def _log(self, missing: dict[str, list[int]]) -> None:
        for reason, nodes in missing.items():
            new = [node for node in nodes if (node, reason) not in self._reported]
            self._reported |= {(node, reason) for node in new}
            if new:
                names = listed([str(node) for node in new])
                log(WARNING, "No counts of %s (%s): %s", counted(len(new), "node"), names, reason)


def _samples(reply: Message) -> int:
    """Samples of a reply that count; 0 if it says none."""
    samples = reply.content.metric_records.get(METRICS, MetricRecord()).get(NUM_EXAMPLES)
    return samples if isinstance(samples, int) else 0
