"""Takes nodes out of a finished run: its model becomes that of the other nodes alone."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from flwr.app import MetricRecord

from flwr_distill.server.record.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from flwr_distill.server.record.recorder import write_model
from flwr_distill.server.record.resume import load_state, lock_run_folder, state_of
from flwr_distill.server.settings import composed_settings
from flwr_distill.server.strategy import strategy_of_run
from flwr_distill.server.task import Task
from flwr_distill.strategies.common.directory import Directory
from flwr_distill.strategies.common.registry import find_strategy
from flwr_distill.task.errors import ReportedError


class ForgetError(ReportedError):
    """The run cannot forget these nodes."""


def forget(folder: Path, names: Collection[str]) -> MetricRecord | None:
    """Take nodes, by name, out of a run's model, and all they sent out of its folder.

    The last checkpoint and the model are replaced, older checkpoints are removed. The report, and
    earlier exports and copies, are unchanged. Returns accuracy and loss of the new model; None if
    the server has no test samples. Raises ForgetError if the run's strategy mixes what nodes sent,
    it has no checkpoint, or no node has such a name.
    """
    with lock_run_folder(folder):
        files = checkpoints(folder)
        if not files:
            raise ForgetError("it has no checkpoint", where=folder)
        checkpoint = load_checkpoint([*files.values()][-1])
        settings = composed_settings().checked(checkpoint.settings, "checkpoint")
        strategy_class, method = find_strategy(settings.strategy)
        if not hasattr(strategy_class, "forget"):
            raise ForgetError(
                f"strategy = {settings.strategy!r} cannot take a node out again: its model mixes "
                "what nodes learnt",
                where=folder,
                remedy="train a new one without the node",
            )
        task = Task.of(settings)
        strategy = strategy_of_run(settings, strategy_class, method, task, Directory())
        load_state(strategy, checkpoint.state)
        try:
            arrays = strategy.forget(names, checkpoint.arrays)  # type: ignore[attr-defined]
        except ValueError as error:
            raise ForgetError(str(error), where=folder) from None
        # The checkpoint last: until it is replaced, a command that broke off can be repeated.
        write_model(folder, task.whole(arrays))
        for older in [*files.values()][:-1]:
            older.unlink()
        save_checkpoint(folder, replace(checkpoint, arrays=arrays, state=state_of(strategy)), 1)
        return task.evaluate(checkpoint.round, arrays) if task.evaluate else None
