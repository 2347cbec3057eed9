"""What a run leaves behind: a line a round as it goes, and a folder of results at its end."""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
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

from server.grid.ledger import Ledger
from server.page import write_report
from server.page.topology_picture import topology_picture
from server.record.journal import Journal
from server.settings import RunSettings

TARGET_ACCURACY = 0.8


@dataclass(frozen=True)
class RoundRow:
    """State of a run at the end of a round; a line of ``metrics.jsonl``.

    Parameters
    ----------
    round : int
        0 is the initial model.
    accuracy : float or None
        On the server's test samples, in [0, 1]; None where the server has none.
    loss : float or None
        Mean cross-entropy there, in nats.
    server_bytes : int
        Bytes through the server so far, both ways.
    link_bytes : int
        Bytes between nodes so far.
    seconds : float
        Since the run began.
    class_accuracy : list[float | None], optional (default: None)
        Accuracy on the test samples of each class; None for a class without any.
    node_accuracy : float or None (default: None)
        Mean over nodes, each counting the same, of the accuracy on what each holds out or on the
        test samples of its own data set; None where nodes were not asked (``fraction-evaluate``).
    set_aside : int (default: 0)
        Set aside in the round: replies of nodes, and what heads and leaders rejected.
    """

    round: int
    accuracy: float | None
    loss: float | None
    server_bytes: int
    link_bytes: int
    seconds: float
    class_accuracy: list[float | None] | None = None
    node_accuracy: float | None = None
    set_aside: int = 0


class RunRecorder:
    """Keeps the record of one run in ``runs/<run-id>/``.

    Parameters
    ----------
    folder : Path
        Where to write; made if absent.
    settings : RunSettings
        Written to ``settings.json`` at once.
    ledger : Ledger
        Where bytes are booked while the run goes.
    journal : Journal
        Is told the round.
    state : Mapping[str, Any], optional (default: None)
        What :meth:`state_dict` gave after a round, of a run that goes on from there.
    """

    def __init__(
        self,
        folder: Path,
        settings: RunSettings,
        ledger: Ledger,
        journal: Journal,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        state = state or {"rows": [], "topology": {}, "heads": {}, "traffic": None}
        self.folder = folder
        self.started = state.get("started") or datetime.now(UTC).isoformat(timespec="seconds")
        """When the run began, in ISO 8601."""
        self.rows = [RoundRow(**row) for row in state["rows"]]
        self._settings = settings
        self._ledger = ledger
        self._journal = journal
        self._begin = time.monotonic() - (self.rows[-1].seconds if self.rows else 0.0)
        self._topology: Mapping[str, Any] = state["topology"]
        self._heads: dict[str, list[str]] = dict(state["heads"])
        if state["traffic"]:
            ledger.load_state_dict(state["traffic"])
        self._events = SummaryWriter(folder, purge_step=len(self.rows))
        self.write_json("settings.json", settings.model_dump(by_alias=True))
        lines = (json.dumps(asdict(row)) + "\n" for row in self.rows)
        (folder / "metrics.jsonl").write_text("".join(lines))

    def state_dict(self) -> dict[str, Any]:
        """What a report tells of the rounds so far, for a checkpoint."""
        rows = [asdict(row) for row in self.rows]
        return {
            "started": self.started,
            "rows": rows,
            "topology": self._topology,
            "heads": self._heads,
            "traffic": self._ledger.state_dict(),
        }

    @property
    def best_round(self) -> int | None:
        """The round with the highest accuracy; None where the server has no test samples."""
        scored = [row for row in self.rows if row.accuracy is not None]
        return max(scored, key=lambda row: row.accuracy or 0.0).round if scored else None

    def write_json(self, name: str, content: Any) -> None:
        """Write ``content`` as a JSON file of the run."""
        (self.folder / name).write_text(json.dumps(content, indent=2) + "\n")

    def record_round(
        self,
        server_round: int,
        metrics: MetricRecord | None,
        topology: Mapping[str, Any] | None,
    ) -> None:
        """Write a round down: a row, a line in the log, traffic and topology so far.

        Parameters
        ----------
        server_round : int
            The round that ended; 0 is the initial model.
        metrics : MetricRecord, optional
            The server's evaluation; None where it has no test samples. ``class-accuracy`` is taken
            out of it, for Flower would log it at length.
        topology : Mapping[str, Any], optional
            Clusters of the round, where the strategy has any.
        """
        self._write_row(server_round, metrics)
        if topology is not None:
            self._topology = topology
            heads = [cluster["head"] for cluster in topology["clusters"]]
            self._heads[str(server_round)] = [head for head in heads if head is not None]
            self.write_json("topology.json", {**topology, "heads": self._heads})
        self._write_traffic({})
        self._journal.round = server_round + 1

    def _write_row(self, server_round: int, metrics: MetricRecord | None) -> None:
        row = RoundRow(
            round=server_round,
            accuracy=_value(metrics, "accuracy"),
            loss=_value(metrics, "loss"),
            server_bytes=self._ledger.server_bytes,
            link_bytes=self._ledger.link_bytes,
            seconds=round(time.monotonic() - self._begin, 3),
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
        """TensorBoard's view of a row."""
        scalars = asdict(row)
        for label, accuracy in enumerate(scalars.pop("class_accuracy") or []):
            scalars[f"class_accuracy/{label}"] = accuracy
        for name, value in scalars.items():
            if value is not None and name != "round":
                self._events.add_scalar(name, value, row.round)
        self._events.flush()

    def _line(self, row: RoundRow) -> str:
        """One line a round: round, accuracy, bytes so far, time left."""
        total = self._settings.num_rounds
        quality = (
            "" if row.accuracy is None else f"  accuracy {row.accuracy:6.1%}  loss {row.loss:.3f}"
        )
        if row.node_accuracy is not None:
            quality += f"  on nodes {row.node_accuracy:6.1%}"
        left = ""
        if row.round:
            since_start = row.seconds - self.rows[0].seconds
            seconds_left = round(since_start / row.round * (total - row.round))
            left = f"  left {seconds_left // 60}:{seconds_left % 60:02d}"
        return f"round {row.round:3d}/{total}{quality}  {row.server_bytes / 1e6:8.2f} MB{left}"

    def _write_traffic(self, formula_bytes: Mapping[str, float]) -> None:
        self.write_json(
            "traffic.json",
            {
                "measured": self._ledger.by_phase(),
                "payloads": self._ledger.payloads_by_phase(),
                "formulas": dict(formula_bytes),
            },
        )

    def break_off(self) -> None:
        """Report what there is of a run that cannot go on."""
        self._events.close()
        log(INFO, "Report so far: %s", write_report(self.folder).resolve())
        log(INFO, 'To go on from the last checkpoint: resume = "%s"', self.folder.name)

    def finish(
        self,
        arrays: ArrayRecord,
        formula_bytes: Mapping[str, float],
        artifacts: Mapping[str, bytes] | None = None,
    ) -> dict[str, Any]:
        """Write the final model, pictures, traffic, summary and report.

        Parameters
        ----------
        arrays : ArrayRecord
            The final model.
        formula_bytes : Mapping[str, float]
            What the papers' formulas say that the run should cost.
        artifacts : Mapping[str, bytes], optional (default: None)
            Files that the strategy leaves, by name.

        Returns
        -------
        dict[str, Any]
            The content of ``summary.json``.
        """
        save_file(
            {name: np.array(array.numpy()) for name, array in arrays.items()},
            self.folder / "model.safetensors",
        )
        if any(self._heads.values()):
            topology = {**self._topology, "heads": self._heads}
            topology_picture(topology).savefig(self.folder / "topology.png", dpi=120)
        self._write_traffic(formula_bytes)
        for name, content in (artifacts or {}).items():
            (self.folder / Path(name).name).write_bytes(content)
        self._draw_accuracy()
        self._events.close()
        last = self.rows[-1]
        summary = {
            "strategy": self._settings.strategy,
            "accuracy": last.accuracy,
            "node_accuracy": last.node_accuracy,
            "rounds": self._rounds_to_target(),
            "server_bytes": last.server_bytes,
            "link_bytes": last.link_bytes,
            "seconds": last.seconds,
        }
        self.write_json("summary.json", summary)
        log(INFO, "Results in %s", self.folder.resolve())
        log(INFO, "Report: %s", write_report(self.folder).resolve())
        return summary

    def _rounds_to_target(self) -> int | None:
        """First round with 80 % accuracy; None if there was none."""
        reached = (r.round for r in self.rows if r.accuracy and r.accuracy >= TARGET_ACCURACY)
        return next(reached, None)

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
    """Take the accuracy of each class out of ``metrics``."""
    values = metrics.pop("class-accuracy", None) if metrics else None
    if not isinstance(values, list):
        return None
    return [float(value) if math.isfinite(value) else None for value in values]
