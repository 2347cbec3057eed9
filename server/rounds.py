"""The rounds of a run, under Flower's own loop, and the step that ends each."""

from collections.abc import Callable
from logging import INFO
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.common import log
from flwr.serverapp.strategy import Strategy

from protocol.method import Method
from server.grid.screening import ScreeningGrid
from server.record.about import about_run, class_counts
from server.record.checkpoint import Checkpoint, save_checkpoint
from server.record.recorder import RunRecorder
from server.record.resume import (
    OffsetRounds,
    continue_on_nodes,
    offset_evaluate,
    restore,
    state_of,
)
from server.roster import Roster
from server.settings import RunSettings
from server.task import Task
from strategies.common.traffic import fedavg_bits
from task.plugin import import_object

EndOfRound = Callable[[int, ArrayRecord], MetricRecord | None]


class Rounds:
    """Runs a strategy from the start, or from a checkpoint, to the last round.

    Parameters
    ----------
    settings : RunSettings
        Of the run.
    run_id : int
        Flower's id of it.
    task : Task
        Data and model.
    method : Method, optional
        The strategy's, where it is declared.
    strategy : Strategy
        What decides.
    grid : ScreeningGrid
        The way to the nodes.
    roster : Roster
        The nodes that were met.
    recorder : RunRecorder
        What the run leaves behind.
    """

    def __init__(
        self,
        settings: RunSettings,
        run_id: int,
        task: Task,
        method: Method | None,
        strategy: Strategy,
        grid: ScreeningGrid,
        roster: Roster,
        recorder: RunRecorder,
    ) -> None:
        self._settings = settings
        self._run_id = run_id
        self._task = task
        self._method = method
        self._strategy = strategy
        self._grid = grid
        self._roster = roster
        self._recorder = recorder

    def run(self, checkpoint: Checkpoint | None = None) -> None:
        """Play all rounds that are left, and write the results.

        Parameters
        ----------
        checkpoint : Checkpoint, optional (default: None)
            Where the run goes on; None begins a new one.

        Raises
        ------
        Exception
            Whatever ends the run early, after a report of the rounds so far.
        """
        self._grid.order = self._roster.order
        getattr(self._strategy, "check_nodes", lambda count: None)(len(self._roster.names))
        self._write_about()
        done, start, strategy = 0, self._task.start, self._strategy
        evaluate: EndOfRound = self.end_round
        if checkpoint:
            done, start = checkpoint.round, checkpoint.arrays
            continue_on_nodes(self._grid, checkpoint, self._roster, self._settings.phase_timeout)
            restore(strategy, checkpoint, self._roster)
            self._grid.begin_round(done + 1)
            strategy, evaluate = OffsetRounds(strategy, done), offset_evaluate(done, evaluate)
        try:
            result = strategy.start(
                grid=self._grid,
                initial_arrays=start,
                num_rounds=self._settings.num_rounds - done,
                timeout=self._settings.phase_timeout,
                train_config=self._train_config(),
                evaluate_fn=evaluate,
            )
        except Exception:
            self._recorder.break_off()
            raise
        self._write_results(result.arrays or start)

    def end_round(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """End a round: evaluate, record, meet new nodes, save a checkpoint.

        Parameters
        ----------
        server_round : int
            The round; 0 is the initial model.
        arrays : ArrayRecord
            The global model after it.
        """
        evaluate = self._task.evaluate
        metrics = evaluate(server_round, arrays) if evaluate else None
        self._recorder.record_round(server_round, metrics, self._topology())
        if self._roster.meet_new(self._grid, self._settings.phase_timeout):
            self._grid.order = self._roster.order
            self._write_about()
        self._save_checkpoint(server_round, arrays)
        self._grid.begin_round(server_round + 1)
        return metrics

    def _topology(self) -> dict[str, Any] | None:
        """The strategy's clusters as they are now, with nodes by name; None where it has none."""
        topology = getattr(self._strategy, "topology", None)
        return topology.to_dict(self._roster.names) if topology else None

    def _save_checkpoint(self, server_round: int, arrays: ArrayRecord) -> None:
        checkpoint = Checkpoint(
            run_id=self._run_id,
            round=server_round,
            settings=self._settings.model_dump(by_alias=True),
            nodes=self._roster.names,
            arrays=arrays,
            state=state_of(self._strategy),
            record=self._recorder.state_dict(),
        )
        recorder = self._recorder
        save_checkpoint(
            recorder.folder, checkpoint, self._settings.keep_checkpoints, recorder.best_round
        )

    def _train_config(self) -> ConfigRecord:
        """Local training settings, as every train message carries them."""
        return ConfigRecord(self._settings.train.model_dump(by_alias=True, exclude={"holdout"}))

    def _write_about(self) -> None:
        about = about_run(self._task.spec, self._roster, self._recorder.started)
        self._recorder.write_json("about.json", about)

    def _write_results(self, arrays: ArrayRecord) -> None:
        counts = class_counts(self._settings, self._task.spec, self._roster)
        self._recorder.write_json("partition.json", counts)
        artifacts: dict[str, bytes] = getattr(self._strategy, "artifacts", dict)()
        self._recorder.finish(arrays, self._formula_bytes(arrays), artifacts)

    def _formula_bytes(self, arrays: ArrayRecord) -> dict[str, float]:
        """What the run should cost by the formulas of FedAvg and of the method, in bytes."""
        num_nodes, rounds = len(self._roster.names), self._settings.num_rounds
        num_weights = sum(array.numpy().size for array in arrays.values())
        bits = {"fedavg (eq. 3)": fedavg_bits(num_nodes, num_weights, rounds)}
        if self._method and self._method.formulas:
            formulas: Any = import_object(self._method.formulas)
            bits |= formulas(self._strategy, num_nodes, num_weights, rounds)
        for name, size in bits.items():
            log(INFO, "Traffic by formula, %s: %.2f MB", name, size / 8e6)
        return {name: size / 8 for name, size in bits.items()}
