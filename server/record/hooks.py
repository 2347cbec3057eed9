"""The hooks that write a run's folder."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from logging import INFO
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord
from flwr.common import log
from torch.utils.tensorboard import SummaryWriter

from flwr_distill.server.hooks import Hook, RoundEnd, RoundRow, RunEnd, RunStart
from flwr_distill.server.page.run_page import write_report
from flwr_distill.server.record.checkpoint import Checkpoints
from flwr_distill.server.record.history import History
from flwr_distill.server.record.recorder import Recorder
from flwr_distill.server.record.scalars import scalars
from flwr_distill.server.settings import RunSettings
from flwr_distill.storage.store import ROUNDS_TO_KEEP

PIXELS = 16
"""Of a cell's side in the images of confusion matrices."""


class Report(Hook):
    """Writes ``report.html`` from the files in a run's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_failure(self, error: Exception, model: ArrayRecord | None) -> None:
        """Write the report so far."""
        log(INFO, "Report so far: %s", write_report(self._folder).resolve())

    def on_run_end(self, end: RunEnd) -> None:
        """Write the report."""
        log(INFO, "Report: %s", write_report(self._folder).resolve())


class TensorBoard(Hook):
    """Writes event files into a run's folder; `class_name` gives a class's name by its label."""

    def __init__(self, folder: Path, class_name: Callable[[int], str] = str) -> None:
        self._folder = folder
        self._class_name = class_name

    def on_run_start(self, run: RunStart) -> None:
        """Open the file; rounds after those that were over before are purged."""
        self._events = SummaryWriter(self._folder, purge_step=len(run.rows))

    def on_round_end(self, end: RoundEnd) -> None:
        """Write a row."""
        self._draw_confusion(end.row)
        for name, value in scalars(end.row, self._class_name).items():
            self._events.add_scalar(name, value, end.row.round)
        self._events.flush()

    def _draw_confusion(self, row: RoundRow) -> None:
        """Write the confusion matrices as grey images, dark where many of a class are."""
        for tag, matrix in (
            ("confusion", row.confusion),
            ("nodes/confusion", (row.node_scores or {}).get("confusion")),
        ):
            if matrix:
                shares = np.array(matrix) / np.maximum(np.sum(matrix, 1, keepdims=True), 1)
                pixels = np.kron(1 - shares, np.ones((PIXELS, PIXELS)))
                self._events.add_image(tag, pixels, row.round, dataformats="HW")

    def on_failure(self, error: Exception, model: ArrayRecord | None) -> None:
        """Close the file."""
        self._events.close()

    def on_run_end(self, end: RunEnd) -> None:
        """Close the file."""
        self._events.close()


@contextmanager
def hooks_of_run(
    folder: Path,
    settings: RunSettings,
    history: History,
    class_name: Callable[[int], str] = str,
    others: Collection[Hook] = (),
) -> Iterator[list[Hook]]:
    """Hooks after the journal, in order: the report reads what the others write.

    Checkpoints are written at once where others' hooks read them, and before an edge answers above.
    An edge keeps as many rounds as nodes do: the server may resume that far behind.
    """
    keep = max(settings.keep_checkpoints, ROUNDS_TO_KEEP if settings.edge else 0)
    at_once = bool(settings.edge) or any(
        type(hook).on_checkpoint is not Hook.on_checkpoint for hook in others
    )
    with Checkpoints(folder, keep, lambda: history.best_round, at_once=at_once) as checkpoints:
        yield [
            Recorder(folder, settings, history),
            TensorBoard(folder, class_name),
            checkpoints,
            Report(folder),
        ]
