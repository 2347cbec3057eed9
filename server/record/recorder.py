"""Writes a run's results: one line per round, and files in the run's folder."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from logging import INFO
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord
from flwr.common import log
from matplotlib.figure import Figure
from safetensors.numpy import save_file

from flwr_distill.base.files import replacing
from flwr_distill.protocol.arrays import as_arrays
from flwr_distill.server.hooks import Hook, RoundEnd, RoundRow, RunEnd, RunStart
from flwr_distill.server.page.drawings import topology_picture
from flwr_distill.server.page.numbers import TARGET, reached
from flwr_distill.server.record.history import History
from flwr_distill.server.settings import RunSettings

MODEL, SUMMARY = "model.safetensors", "summary.json"
"""Files of a run that has ended."""


class Recorder(Hook):
    """Writes one run's folder, ``runs/<run-id>/``."""

    def __init__(self, folder: Path, settings: RunSettings, history: History) -> None:
        self._folder = folder
        self._settings = settings
        self._history = history

    def on_run_start(self, run: RunStart) -> None:
        """Write the settings, and rows of rounds that were over before.

        The model of a run that this one resumes is removed: it is of an earlier round.
        """
        (self._folder / MODEL).unlink(missing_ok=True)
        self._write("settings.json", run.settings)
        write_rows(self._folder, self._history)

    def on_round_end(self, end: RoundEnd) -> None:
        """Write row, log line, traffic and topology so far."""
        with (self._folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(asdict(end.row)) + "\n")
        log(INFO, "%s", self._line(end.row))
        if end.topology is not None:
            self._write("topology.json", {**end.topology, "heads": self._history.heads})
        self._write_traffic({})

    def on_failure(self, error: Exception, model: ArrayRecord | None) -> None:
        """Write the model, if the run has learnt anything."""
        if model is not None:
            write_model(self._folder, model)

    def on_run_end(self, end: RunEnd) -> None:
        """Write partition, model, pictures, traffic, the strategy's files, and the summary."""
        self._write("partition.json", end.partition)
        if end.model is not None:
            write_model(self._folder, end.model)
        if any(self._history.heads.values()):
            topology = {**self._history.topology, "heads": self._history.heads}
            self._save_picture(topology_picture(topology), "topology.png")
        self._write_traffic(end.formula_bytes)
        for name, content in end.artifacts.items():
            with replacing(self._folder / Path(name).name, durable=False) as partial:
                partial.write_bytes(content)
        self._draw_accuracy()
        last, target = self._history.rows[-1], reached(self._history.dicts(), TARGET)
        summary = {
            "strategy": self._settings.strategy,
            "accuracy": last.accuracy,
            "node_accuracy": last.node_accuracy,
            "rounds": target["round"] if target else None,
            "server_bytes": last.server_bytes,
            "link_bytes": last.link_bytes,
            "seconds": last.seconds,
            "warnings": list(end.warnings),
        }
        self._write(SUMMARY, summary)
        log(INFO, "Results in %s", self._folder.resolve())

    def _write(self, name: str, content: Any) -> None:
        write_json(self._folder / name, content)

    def _line(self, row: RoundRow) -> str:
        total = self._settings.num_rounds
        line = f"round {row.round:3d}/{total}"
        if row.accuracy is not None:
            line += f"  accuracy {row.accuracy:6.1%}  loss {row.loss:.3f}"
        if row.node_accuracy is not None:
            line += f"  on nodes {row.node_accuracy:6.1%}"
        line += f"  {row.server_bytes / 1e6:8.2f} MB"
        if row.round:
            seconds = row.seconds - self._history.rows[0].seconds
            left = round(seconds / row.round * (total - row.round))
            line += f"  left {left // 60}:{left % 60:02d}"
        return line

    def _write_traffic(self, formula_bytes: Mapping[str, float]) -> None:
        ledger = self._history.ledger
        self._write(
            "traffic.json",
            {
                "measured": ledger.by_phase(),
                "payloads": ledger.payloads_by_phase(),
                "formulas": dict(formula_bytes),
            },
        )

    def _draw_accuracy(self) -> None:
        rows = [row for row in self._history.rows if row.accuracy is not None]
        if not rows:
            return
        figure = Figure(figsize=(6, 4))
        axes = figure.subplots()
        axes.plot([r.round for r in rows], [100 * (r.accuracy or 0) for r in rows], marker="o")
        axes.set(xlabel="round", ylabel="test accuracy (%)", ylim=(0, 100))
        axes.set_title(f"{self._settings.strategy} on {self._settings.dataset}")
        axes.grid(alpha=0.3)
        self._save_picture(figure, "accuracy.png")

    def _save_picture(self, figure: Figure, name: str) -> None:
        with replacing(self._folder / name, durable=False) as partial:
            figure.savefig(partial, dpi=120, format="png")


def write_model(folder: Path, arrays: ArrayRecord) -> None:
    """Write the model of a run's folder; where there is no room, the one before stays."""
    with replacing(folder / MODEL) as partial:
        save_file(as_arrays(arrays), partial)


def write_json(file: Path, content: Any) -> None:
    """Write a JSON file of a run's folder; where there is no room, the one before stays."""
    with replacing(file, durable=False) as partial:
        partial.write_text(json.dumps(content, indent=2) + "\n")


def write_rows(folder: Path, history: History) -> None:
    """Write ``metrics.jsonl`` of a run's folder again."""
    lines = (json.dumps(row) + "\n" for row in history.dicts())
    with replacing(folder / "metrics.jsonl", durable=False) as partial:
        partial.write_text("".join(lines))
