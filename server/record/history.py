"""Results of a run so far: a row for each round, and the clusters."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
from flwr.app import MetricRecord

from flwr_distill.server.grid.ledger import Ledger
from flwr_distill.server.grid.node_counts import NodeCounts
from flwr_distill.server.hooks import RoundRow
from flwr_distill.server.page.numbers import ACCURACY, best
from flwr_distill.server.record.journal import Journal
from flwr_distill.task.scores import Counts, num_classes, summary


class History:
    """Measures each round: a resumed run continues from the checkpoint's `state`."""

    def __init__(
        self,
        ledger: Ledger,
        journal: Journal,
        state: Mapping[str, Any] | None = None,
        *,
        counts: NodeCounts | None = None,
        best_by: str = ACCURACY,
        seed: int = 0,
    ) -> None:
        if state is None:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            state = {"started": now, "rows": "[]", "topology": {}, "heads": {}, "traffic": None}
        self.started: str = state["started"]
        self.rows = [RoundRow(**row) for row in json.loads(state["rows"])]
        self._encoded = [json.dumps(vars(row)) for row in self.rows]
        self.topology: Mapping[str, Any] = state["topology"]  # of the last round that had any
        self.heads: dict[str, list[str]] = dict(state["heads"])  # of clusters, by round
        self.ledger = ledger
        self._journal = journal
        self._counts = counts or NodeCounts(0, wanted=False)
        self._best_by = best_by
        self._seed = seed
        self._start = time.monotonic() - (self.rows[-1].seconds if self.rows else 0.0)
        if state["traffic"]:
            ledger.load_state_dict(state["traffic"])

    def state_dict(self) -> dict[str, Any]:
        """Results so far, for a checkpoint."""
        return {
            "started": self.started,
            "rows": f"[{', '.join(self._encoded)}]",  # else each round would encode all again
            "topology": self.topology,
            "heads": self.heads,
            "traffic": self.ledger.state_dict(),
        }

    def dicts(self) -> list[dict[str, Any]]:
        """Rows as in ``metrics.jsonl``."""
        return [dict(vars(row)) for row in self.rows]

    @property
    def best_round(self) -> int | None:
        """The best round by `best_by` (``best-metric``); None if it is unknown of all."""
        row = best(self.dicts(), self._best_by)
        return row["round"] if row else None

    def end_round(
        self, server_round: int, metrics: MetricRecord | None, topology: Mapping[str, Any] | None
    ) -> RoundRow:
        """Measure a round that is over.

        Lists are removed from `metrics`, because Flower would log them at length.
        """
        vector = metrics.pop("counts", None) if metrics else None
        found = self._summary(server_round, vector) if isinstance(vector, list) else {}
        row = RoundRow(
            round=server_round,
            accuracy=_value(metrics, "accuracy"),
            loss=_value(metrics, "loss"),
            server_bytes=self.ledger.server_bytes,
            link_bytes=self.ledger.link_bytes,
            seconds=round(time.monotonic() - self._start, 3),
            class_accuracy=_class_accuracy(metrics),
            node_accuracy=self._journal.mean("evaluate", "eval-accuracy"),
            balanced_accuracy=_known(metrics, "balanced-accuracy"),
            macro_f1=_known(metrics, "macro-f1"),
            auroc=_known(metrics, "auroc"),
            ece=_known(metrics, "ece"),
            intervals=found.get("intervals"),
            confusion=found.get("confusion"),
            node_scores=self._counts.summary(server_round),
            set_aside=self._journal.set_aside,
        )
        self.rows.append(row)
        self._encoded.append(json.dumps(vars(row)))
        if topology is not None:
            self.topology = topology
            heads = [cluster["head"] for cluster in topology["clusters"]]
            self.heads[str(server_round)] = [head for head in heads if head is not None]
        return row

    def _summary(self, server_round: int, vector: Sequence[float]) -> dict[str, Any]:
        """Intervals and confusion matrix of the server's counts."""
        counts = Counts.from_vector(np.array(vector, np.int64), num_classes(len(vector)))
        return summary(counts, np.random.default_rng([self._seed, server_round]))

    def add_evaluation(self, server_round: int) -> bool:
        """Add the nodes' late evaluation, from the journal, if this is the last round."""
        if not self.rows or self.rows[-1].round != server_round:
            return False
        accuracy = self._journal.mean("evaluate", "eval-accuracy")
        scores = self._counts.summary(server_round)
        self.rows[-1] = replace(self.rows[-1], node_accuracy=accuracy, node_scores=scores)
        self._encoded[-1] = json.dumps(vars(self.rows[-1]))
        return True


def _known(metrics: MetricRecord | None, key: str) -> float | None:
    """A metric; None for NaN too."""
    value = _value(metrics, key)
    return value if value is not None and math.isfinite(value) else None


def _value(metrics: MetricRecord | None, key: str) -> float | None:
    value = metrics.get(key) if metrics else None
    return float(value) if isinstance(value, int | float) else None


def _class_accuracy(metrics: MetricRecord | None) -> list[float | None] | None:
    """Remove the accuracy of each class from `metrics`; NaN becomes None."""
    values = metrics.pop("class-accuracy", None) if metrics else None
    if not isinstance(values, list):
        return None
    return [float(value) if math.isfinite(value) else None for value in values]
