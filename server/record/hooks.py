"""The hooks that write a run's folder."""

from collections.abc import Callable
from pathlib import Path

from flwr_distill.server.hooks import Hook
from flwr_distill.server.record.checkpoint import Checkpoints
from flwr_distill.server.record.history import History
from flwr_distill.server.record.recorder import Recorder
from flwr_distill.server.record.report import Report
from flwr_distill.server.record.tensorboard import TensorBoard
from flwr_distill.server.settings import RunSettings


def hooks_of_run(
    folder: Path,
    settings: RunSettings,
    history: History,
    class_name: Callable[[int], str] = str,
) -> list[Hook]:
    """Hooks after the journal, in order: the report reads what the others write."""
    return [
        Recorder(folder, settings, history),
        TensorBoard(folder, class_name),
        Checkpoints(folder, settings.keep_checkpoints, lambda: history.best_round),
        Report(folder),
    ]
