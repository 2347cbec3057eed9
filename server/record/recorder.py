"""Writes a run's results: one line per round, and files in the run's folder."""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from logging import INFO
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from flwr.common import log
from matplotlib.figure import Figure
from safetensors.numpy import save_file
from torch.utils.tensorboard import SummaryWriter

from flwr_distill.server.grid.ledger import Ledger
from flwr_distill.server.page.comparison import best, reached
from flwr_distill.server.page.numbers import TARGET
from flwr_distill.server.page.run_page import write_report
from flwr_distill.server.page.topology_picture import topology_picture
from flwr_distill.server.record.journal import Journal
from flwr_distill.server.settings import RunSettings


@dataclass(frozen=True)
class RoundRow:
    """State of a run at the end of a round; a line of ``metrics.jsonl``.

    Accuracies are in [0, 1]. Bytes and seconds count from the start of the run.
    """

    round: int
    accuracy: float | None  # None if the server has no test samples, or no global model
    loss: float | None  # mean cross-entropy in nats; None likewise
    server_bytes: int  # both ways
    link_bytes: int  # between nodes
    seconds: float
    class_accuracy: list[float | None] | None = None  # None for a class without samples
    node_accuracy: float | None = None  # unweighted mean over nodes; None if nodes did not evaluate
    set_aside: int = 0  # replies, plus parcels and models that heads and leaders rejected


class RunRecorder:
    """Writes one run's folder, ``runs/<run-id>/``.

    `state` is a checkpoint's record (:meth:`state_dict`) if the run is resumed; `class_name` gives
    a class's name by its label.
    """

    def __init__(
        self,
        folder: Path,
        settings: RunSettings,
        ledger: Ledger,
        journal: Journal,
        state: Mapping[str, Any] | None = None,
        class_name: Callable[[int], str] = str,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        state = state or {"rows": [], "topology": {}, "heads": {}, "traffic": None}
        self.folder = folder
        self.started = state.get("started") or datetime.now(UTC).isoformat(timespec="seconds")
        self.rows = [RoundRow(**row) for row in state["rows"]]
        self._settings = settings
        self._ledger = ledger
        self._journal = journal
        self._class_name = class_name
        self._start = time.monotonic() - (self.rows[-1].seconds if self.rows else 0.0)
        self._topology: Mapping[str, Any] = state["topology"]
        self._read: dict[str, Mapping[str, Any]] = {}
        self._heads: dict[str, list[str]] = dict(state["heads"])
        if state["traffic"]:
            ledger.load_state_dict(state["traffic"])
        self._events = SummaryWriter(folder, purge_step=len(self.rows))
        self.write_json("settings.json", settings.model_dump(by_alias=True))
        self._write_rows()

    def state_dict(self) -> dict[str, Any]:
        """Results so far, for a checkpoint."""
        return {
            "started": self.started,
            "rows": self._dicts(),
            "topology": self._topology,
            "heads": self._heads,
            "traffic": self._ledger.state_dict(),
        }

    @property
    def best_round(self) -> int | None:
        """Round with the highest accuracy on the server's test samples; None without any."""
        row = best(self._dicts())
        return row["round"] if row else None

    def write_json(self, name: str, content: Any) -> None:
        """Write ``content`` as a JSON file in the run's folder."""
        (self.folder / name).write_text(json.dumps(content, indent=2) + "\n")

    def record_data(self, nodes: Mapping[str, Mapping[str, Any]], server: str) -> None:
        """Record in the journal what nodes have read, each once, and what the server has.

        Parameters
        ----------
        nodes : Mapping[str, Mapping[str, Any]]
            Samples and fingerprint by node.
        server : str
            Fingerprint of its data set.
        """
        new = {node: read for node, read in nodes.items() if node not in self._read}
        if new:
            self._read |= new
            self._journal.book_data(new, server)

    def begin_round(self, server_round: int) -> None:
        """Count what comes as of a round, where rounds are asked for from above an edge."""
        self._journal.round = server_round

    def record_evaluation(self, server_round: int) -> None:
        """Record what nodes say of a model that came after the end of the round."""
        if not self.rows or self.rows[-1].round != server_round:
            return
        accuracy = self._journal.mean("evaluate", "eval-accuracy")
        self.rows[-1] = replace(self.rows[-1], node_accuracy=accuracy)
        self._write_rows()

    def record_round(
        self, server_round: int, metrics: MetricRecord | None, topology: Mapping[str, Any] | None
    ) -> None:
        """Record the end of a round: row, log line, traffic and topology so far.

        Round 0 is the initial model. ``class-accuracy`` is removed from `metrics`, because Flower
        would log it at length.
        """
        self._write_row(server_round, metrics)
        if topology is not None:
            self._topology = topology
            heads = [cluster["head"] for cluster in topology["clusters"]]
            self._heads[str(server_round)] = [head for head in heads if head is not None]
            self.write_json("topology.json", {**topology, "heads": self._heads})
        self._write_traffic({})
        self._journal.round = server_round + 1

    def _write_rows(self) -> None:
        lines = (json.dumps(row) + "\n" for row in self._dicts())
        (self.folder / "metrics.jsonl").write_text("".join(lines))

    def _write_row(self, server_round: int, metrics: MetricRecord | None) -> None:
        row = RoundRow(
            round=server_round,
            accuracy=_value(metrics, "accuracy"),
            loss=_value(metrics, "loss"),
            server_bytes=self._ledger.server_bytes,
            link_bytes=self._ledger.link_bytes,
            seconds=round(time.monotonic() - self._start, 3),
            class_accuracy=_class_accuracy(metrics),
            node_accuracy=self._journal.mean("evaluate", "eval-accuracy"),
            set_aside=self._journal.set_aside,
        )
        self.rows.append(row)
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        self._write_events(row)
        log(INFO, "%s", self._line(row))

    def _write_events(self, row: RoundRow) -> None:
        """Write a row for TensorBoard."""
        scalars = asdict(row)
        for label, accuracy in enumerate(scalars.pop("class_accuracy") or []):
            scalars[f"class_accuracy/{self._class_name(label)}"] = accuracy
        for name, value in scalars.items():
            if value is not None and name != "round":
                self._events.add_scalar(name, value, row.round)
        self._events.flush()

    def _line(self, row: RoundRow) -> str:
        total = self._settings.num_rounds
        line = f"round {row.round:3d}/{total}"
        if row.accuracy is not None:
            line += f"  accuracy {row.accuracy:6.1%}  loss {row.loss:.3f}"
        if row.node_accuracy is not None:
            line += f"  on nodes {row.node_accuracy:6.1%}"
        line += f"  {row.server_bytes / 1e6:8.2f} MB"
        if row.round:
            seconds = row.seconds - self.rows[0].seconds
            left = round(seconds / row.round * (total - row.round))
            line += f"  left {left // 60}:{left % 60:02d}"
        return line

    def _write_traffic(self, formula_bytes: Mapping[str, float]) -> None:
        self.write_json(
            "traffic.json",
            {
                "measured": self._ledger.by_phase(),
                "payloads": self._ledger.payloads_by_phase(),
                "formulas": dict(formula_bytes),
            },
        )

    def break_off(self, error: Exception, arrays: ArrayRecord | None) -> None:
        """Write the report of a run that failed, and its model if it has learnt anything."""
        self._journal.book_error(f"The run failed. {type(error).__name__}: {error}")
        if arrays is not None:
            self._save_model(arrays)
        self._events.close()
        log(INFO, "Report so far: %s", write_report(self.folder).resolve())

    def finish(
        self,
        arrays: ArrayRecord | None,
        formula_bytes: Mapping[str, float],
        artifacts: Mapping[str, bytes] | None = None,
        warnings: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Write model, pictures, traffic, summary and report; return ``summary.json``.

        Parameters
        ----------
        arrays : ArrayRecord or None
            The final model; None if nodes keep models of their own.
        formula_bytes : Mapping[str, float]
            Cost of the run by the papers' formulas.
        artifacts : Mapping[str, bytes], optional (default: None)
            The strategy's own files, by name.
        warnings : Sequence[str] (default: ())
            What may be wrong with the federation.
        """
        if arrays is not None:
            self._save_model(arrays)
        if any(self._heads.values()):
            topology = {**self._topology, "heads": self._heads}
            topology_picture(topology).savefig(self.folder / "topology.png", dpi=120)
        self._write_traffic(formula_bytes)
        for name, content in (artifacts or {}).items():
            (self.folder / Path(name).name).write_bytes(content)
        self._draw_accuracy()
        self._events.close()
        last, target = self.rows[-1], reached(self._dicts(), TARGET)
        summary = {
            "strategy": self._settings.strategy,
            "accuracy": last.accuracy,
            "node_accuracy": last.node_accuracy,
            "rounds": target["round"] if target else None,
            "server_bytes": last.server_bytes,
            "link_bytes": last.link_bytes,
            "seconds": last.seconds,
            "warnings": list(warnings),
        }
        self.write_json("summary.json", summary)
        log(INFO, "Results in %s", self.folder.resolve())
        log(INFO, "Report: %s", write_report(self.folder).resolve())
        return summary

    def _save_model(self, arrays: ArrayRecord) -> None:
        # In C order, since safetensors writes bytes as they lie in memory.
        weights = {name: np.array(array.numpy(), order="C") for name, array in arrays.items()}
        save_file(weights, self.folder / "model.safetensors")

    def _dicts(self) -> list[dict[str, Any]]:
        return [asdict(row) for row in self.rows]

    def _draw_accuracy(self) -> None:
        rows = [row for row in self.rows if row.accuracy is not None]
        if not rows:
            return
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        axes.plot([r.round for r in rows], [100 * (r.accuracy or 0) for r in rows], marker="o")
        axes.set(xlabel="round", ylabel="test accuracy (%)", ylim=(0, 100))
        axes.set_title(f"{self._settings.strategy} on {self._settings.dataset}")
        axes.grid(alpha=0.3)
        figure.savefig(self.folder / "accuracy.png", dpi=120)


def _value(metrics: MetricRecord | None, key: str) -> float | None:
    value = metrics.get(key) if metrics else None
    return float(value) if isinstance(value, int | float) else None


def _class_accuracy(metrics: MetricRecord | None) -> list[float | None] | None:
    """Remove the accuracy of each class from `metrics`; NaN becomes None."""
    values = metrics.pop("class-accuracy", None) if metrics else None
    if not isinstance(values, list):
        return None
    return [float(value) if math.isfinite(value) else None for value in values]
