"""Results of a run so far: a row for each round, and the clusters."""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from flwr.app import MetricRecord

from flwr_distill.server.grid.ledger import Ledger
from flwr_distill.server.hooks import RoundRow
from flwr_distill.server.page.numbers import best
from flwr_distill.server.record.journal import Journal


class History:
    """Measures each round: a resumed run continues from the checkpoint's `state`."""

    def __init__(
        self, ledger: Ledger, journal: Journal, state: Mapping[str, Any] | None = None
    ) -> None:
        state = state or {"rows": "[]", "topology": {}, "heads": {}, "traffic": None}
        self.started: str = state.get("started") or datetime.now(UTC).isoformat(timespec="seconds")
        self.rows = [RoundRow(**row) for row in json.loads(state["rows"])]
        self._encoded = [json.dumps(vars(row)) for row in self.rows]
        self.topology: Mapping[str, Any] = state["topology"]  # of the last round that had any
        self.heads: dict[str, list[str]] = dict(state["heads"])  # of clusters, by round
        self.ledger = ledger
        self._journal = journal
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
        """Round with the highest accuracy on the server's test samples; None without any."""
        row = best(self.dicts())
        return row["round"] if row else None

    def end_round(
        self, server_round: int, metrics: MetricRecord | None, topology: Mapping[str, Any] | None
    ) -> RoundRow:
        """Measure a round that is over.

        ``class-accuracy`` is removed from `metrics`, because Flower would log it at length.
        """
        row = RoundRow(
            round=server_round,
            accuracy=_value(metrics, "accuracy"),
            loss=_value(metrics, "loss"),
            server_bytes=self.ledger.server_bytes,
            link_bytes=self.ledger.link_bytes,
            seconds=round(time.monotonic() - self._start, 3),
            class_accuracy=_class_accuracy(metrics),
            node_accuracy=self._journal.mean("evaluate", "eval-accuracy"),
            set_aside=self._journal.set_aside,
        )
        self.rows.append(row)
        self._encoded.append(json.dumps(vars(row)))
        if topology is not None:
            self.topology = topology
            heads = [cluster["head"] for cluster in topology["clusters"]]
            self.heads[str(server_round)] = [head for head in heads if head is not None]
        return row

    def add_evaluation(self, server_round: int) -> bool:
        """Add the nodes' late evaluation, from the journal, if this is the last round."""
        if not self.rows or self.rows[-1].round != server_round:
            return False
        accuracy = self._journal.mean("evaluate", "eval-accuracy")
        self.rows[-1] = replace(self.rows[-1], node_accuracy=accuracy)
        self._encoded[-1] = json.dumps(vars(self.rows[-1]))
        return True


def _value(metrics: MetricRecord | None, key: str) -> float | None:
    value = metrics.get(key) if metrics else None
    return float(value) if isinstance(value, int | float) else None


def _class_accuracy(metrics: MetricRecord | None) -> list[float | None] | None:
    """Remove the accuracy of each class from `metrics`; NaN becomes None."""
    values = metrics.pop("class-accuracy", None) if metrics else None
    if not isinstance(values, list):
        return None
    return [float(value) if math.isfinite(value) else None for value in values]
